"""What one forward pass reads, as plain lists: from scheduled tokens to rows of a batch."""

from dataclasses import dataclass

from echokv.engine.scheduler import ScheduledRequest
from echokv.memory.slots import BLOCK_TOKENS, NO_SLOT


@dataclass(frozen=True, kw_only=True)
class PassInputs:
    """The rows of one pass, padding included; `cache.batch.ForwardBatch` says what each is."""

    token_ids: list[int]  # 0 where the token is pending
    pending: list[tuple[int, int]]  # (row, row of the step in flight that samples its token)
    positions: list[int]
    context_lens: list[int]
    host_slots: list[int]
    request_rows: list[int]
    request_slots: list[int]
    block_tables: list[list[int]]  # one a request, of different lengths
    sampled_rows: list[int]
    num_context_rows: int
    num_real_tokens: int

    @classmethod
    def gather(cls, items: list[ScheduledRequest], rows: int) -> "PassInputs":
        """Lay out scheduled tokens in order, then padding up to `rows` rows."""
        token_ids: list[int] = []
        pending: list[tuple[int, int]] = []
        positions: list[int] = []
        host_slots: list[int] = []
        request_rows: list[int] = []
        request_slots: list[int] = []
        sampled_rows: list[int] = []
        for row, item in enumerate(items):
            request = item.request
            span = range(item.start, item.start + item.count)
            token_ids += request.token_ids[item.start : item.start + item.count]
            if item.start + item.count > request.num_tokens:
                pending.append((len(token_ids), request.pending_row))
                token_ids.append(0)
            positions += span
            host_slots += [
                request.block_ids[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS
                for at in span
            ]
            request_rows += [row] * item.count
            request_slots += [request.request_slot] * item.count
            if item.samples:
                sampled_rows.append(len(token_ids) - 1)
        real = len(token_ids)
        padding = rows - real
        return cls(
            token_ids=token_ids + [0] * padding,
            pending=pending,
            positions=positions + [0] * padding,
            context_lens=[at + 1 for at in positions] + [0] * padding,
            host_slots=host_slots + [NO_SLOT] * padding,
            request_rows=request_rows + [0] * padding,
            request_slots=request_slots + [NO_SLOT] * padding,
            block_tables=[item.request.block_ids for item in items],
            sampled_rows=sampled_rows,
            num_context_rows=sum(item.start + item.count for item in items),
            num_real_tokens=real,
        )

    def padded_tables(self) -> list[list[int]]:
        """The block tables at the length of the longest."""
        width = max(len(table) for table in self.block_tables)
        return [table + [NO_SLOT] * (width - len(table)) for table in self.block_tables]
