"""One request on its way through the engine: its tokens, its host blocks, how far it has come.

Knows nothing about queues, tensors or text; the scheduler moves it, `engine.output` ends it.
"""

import hashlib
from array import array
from enum import Enum, auto

from echokv.engine.sampling_params import SamplingParams
from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """A request's state.

    Attributes:
        token_ids: prompt then output, as far as the CPU knows them; what the rows in its blocks
            stand for.
        num_pending_tokens: tokens after those that steps in flight sample.
        pending_row: where the step in flight leaves the pending token, a row of its samples.
        num_computed_tokens: leading tokens whose rows are in the host pool, or will be once the
            step in flight is done.
        block_ids: host blocks in order of position; the same list from admission to release.
        request_slot: its number among running requests; -1 when it doesn't run.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        seed: base of this request's random numbers, fixed for its whole life.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        seed: int,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_total_tokens = max_total_tokens
        self.seed = seed
        self.status = RequestStatus.WAITING
        self.num_pending_tokens = 0
        self.pending_row = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.block_ids: list[int] = []
        self.request_slot = NO_SLOT
        self._block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, pending ones left out."""
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Prompt and output tokens, pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def next_output_index(self) -> int:
        """How many output tokens come before the one that is sampled next."""
        return self.length - self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, pending ones left out."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    def block_hashes(self) -> list[bytes]:
        """Hash of every full block of known tokens; each covers all before it (a hash chain)."""
        full = self.num_tokens // BLOCK_TOKENS
        for index in range(len(self._block_hashes), full):
            parent = self._block_hashes[-1] if self._block_hashes else b""
            tokens = self.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            digest = hashlib.blake2b(parent, digest_size=16)
            digest.update(array("q", tokens).tobytes())
            self._block_hashes.append(digest.digest())
        return self._block_hashes
