"""Long-context tasks with one right answer, generated: what the demo model learned and is asked.

Every instance comes from a seed. `make_task` draws held-out instances; training draws its own with
`make_document` from other seeds and other filler text. Knows nothing of models or tokenizers: the
caller says how many tokens a text has. A prompt is one user message; send it through the chat
template.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from echokv.bench.filler import filler_from
from echokv.errors import ConfigError

TokenCount = Callable[[str], int]

QUESTION_TOKENS = 96
"""Room kept below the target for the longest question."""

ADJECTIVES = (
    "amber bold brave bright calm clever crisp dark deep eager fair fast fierce gentle glad grand"
    " green happy heavy honest icy jolly keen kind large late light lively lucky mellow merry mild"
    " neat noble odd pale plain polite proud quick quiet rapid rare red rich round royal sharp shy"
    " silent silver sleepy slow small smooth solid stern strong sunny sweet swift tall warm wild"
).split()
NOUNS = (
    "anchor apple arrow badge basket beacon bell bird bridge brook camel candle castle cedar cloud"
    " comet coral crane crown dragon eagle falcon feather forest fox garden glacier hammer harbor"
    " heron hill horse island jacket kettle ladder lantern lemon lion maple meadow mirror mountain"
    " needle ocean otter owl panther pearl piano pine planet rabbit raven river rocket saddle"
    " shadow spider tiger tower valley violin whale window"
).split()

MOST_RECORDS = len(ADJECTIVES) * len(NOUNS)
"""As many as there are names."""


@dataclass(frozen=True, kw_only=True)
class TaskDocument:
    """A text, and questions about it that don't depend on each other.

    `text` ends with a newline; `questions` are (question, answer) pairs.
    """

    text: str
    questions: tuple[tuple[str, str], ...]

    def prompt(self, number: int = 0) -> str:
        """The text and one question as a user message."""
        return f"{self.text}\n{self.questions[number][0]}"


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a generator works from. `tokens` bounds the text alone."""

    tokens: int
    count: TokenCount
    rng: Random
    questions: int
    split: str


def make_task(
    name: str, target_tokens: int, tokenizer_len_fn: TokenCount, seed: int
) -> tuple[str, str]:
    """One held-out instance.

    Args:
        name: one of `TASKS`.
        target_tokens: the prompt has at most as many tokens, and little less.
        tokenizer_len_fn: tokens of a text, special tokens not counted.
        seed: another seed, another instance; never one that training saw.

    Returns:
        prompt (a user message) and the answer, to be compared with the stripped output.

    Raises:
        ConfigError: an unknown name, or no room for the smallest instance.
    """
    rng = Random(f"held-out {name} {target_tokens} {seed}")
    document = make_document(name, target_tokens, tokenizer_len_fn, rng, split="held-out")
    return document.prompt(), document.questions[0][1]


def make_document(
    name: str,
    target_tokens: int,
    tokenizer_len_fn: TokenCount,
    rng: Random,
    *,
    questions: int = 1,
    split: str = "train",
) -> TaskDocument:
    """An instance with up to `questions` questions about one text.

    Args:
        name: one of `TASKS`.
        target_tokens: bound on the text and one question.
        tokenizer_len_fn: tokens of a text.
        rng: source of every choice.
        questions: at most as many; some tasks have but one.
        split: which filler text, "train" or "held-out".

    Raises:
        ConfigError: an unknown name, or no room for the smallest instance.
    """
    if name not in _GENERATORS:
        raise ConfigError(f"task {name!r} is not one of {', '.join(TASKS)}")
    request = _Request(
        tokens=target_tokens - QUESTION_TOKENS,
        count=tokenizer_len_fn,
        rng=rng,
        questions=questions,
        split=split,
    )
    return _GENERATORS[name](request)


def kv_document(records: Sequence[tuple[str, str]], keys: Sequence[str]) -> TaskDocument:
    """Key-value records as a JSON object, one a line; asks for the value of each of `keys`.

    Also for records from elsewhere, such as Lost in the Middle's UUID pairs.
    """
    values = dict(records)
    lines = ",\n".join(f'"{key}": "{value}"' for key, value in records)
    return TaskDocument(
        text=f"{{\n{lines}\n}}\n",
        questions=tuple((f'What is the value of "{key}"?', values[key]) for key in keys),
    )


def kv_prompt(records: Sequence[tuple[str, str]], key: str) -> str:
    """`kv_document` with one question, as a user message."""
    return kv_document(records, [key]).prompt()


def _digits(rng: Random, count: int) -> str:
    return str(rng.randrange(10 ** (count - 1), 10**count))


def _name(rng: Random) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _names(rng: Random, count: int) -> list[str]:
    """Distinct names; at most 4,160 exist."""
    numbers = rng.sample(range(MOST_RECORDS), count)
    return [f"{ADJECTIVES[n // len(NOUNS)]}-{NOUNS[n % len(NOUNS)]}" for n in numbers]


def _hide(lines: list[str], request: _Request) -> str:
    """Filler up to the bound, with `lines` in their order at random places between its lines."""
    room = request.tokens - request.count("".join(lines))
    if room < 0:
        raise ConfigError(f"no room for {len(lines)} lines in {request.tokens} tokens")
    stream, filler = filler_from(request.split, request.rng), list[str]()
    while True:
        piece = stream.take(8)
        room -= request.count("".join(piece))
        if room < 0:
            break
        filler += piece
    places = sorted(request.rng.randint(0, len(filler)) for _ in lines)
    for place, line in reversed(list(zip(places, lines, strict=True))):
        filler.insert(place, line)
    return "".join(filler)


def _passkey(request: _Request) -> TaskDocument:
    passkey = _digits(request.rng, 8)
    text = _hide([f"The passkey is {passkey}.\n"], request)
    return TaskDocument(text=text, questions=(("What is the passkey?", passkey),))


def _secret_numbers(request: _Request) -> tuple[dict[str, str], str]:
    """Names with numbers, and the text that hides them."""
    rng = request.rng
    count = max(3, min(12, request.tokens // 60))
    secrets = {name: _digits(rng, 6) for name in _names(rng, count)}
    lines = [f"The secret number of {name} is {number}.\n" for name, number in secrets.items()]
    return secrets, _hide(lines, request)


def _needle(request: _Request) -> TaskDocument:
    secrets, text = _secret_numbers(request)
    asked = request.rng.sample(sorted(secrets), min(request.questions, len(secrets)))
    return TaskDocument(
        text=text,
        questions=tuple((f"What is the secret number of {n}?", secrets[n]) for n in asked),
    )


def _multi_needle(request: _Request) -> TaskDocument:
    secrets, text = _secret_numbers(request)
    questions = []
    for _ in range(request.questions):
        first, second, third = request.rng.sample(sorted(secrets), 3)
        question = f"What are the secret numbers of {first}, {second} and {third}?"
        questions.append((question, f"{secrets[first]}, {secrets[second]}, {secrets[third]}"))
    return TaskDocument(text=text, questions=tuple(questions))


def _kv(request: _Request, pair: Callable[[], tuple[str, str]]) -> TaskDocument:
    """Records until the bound, or 4,160; nothing but distractors."""
    records: dict[str, str] = {}
    room, record_tokens = request.tokens - 8, request.tokens
    while len(records) < MOST_RECORDS:
        more = max(1, int(0.8 * room / record_tokens))  # few calls of count
        size = min(len(records) + more, MOST_RECORDS)
        piece: dict[str, str] = {}
        while len(records) + len(piece) < size:
            key, value = pair()
            if key not in records:
                piece[key] = value
        tokens = request.count("".join(f'"{k}": "{v}",\n' for k, v in piece.items()))
        if tokens > room:
            break
        room, record_tokens = room - tokens, -(-tokens // len(piece))
        records |= piece
    if not records:
        raise ConfigError(f"no room for a record in {request.tokens} tokens")
    asked = request.rng.sample(list(records), min(request.questions, len(records)))
    return kv_document(list(records.items()), asked)


def _kv_uuid(request: _Request) -> TaskDocument:
    def pair() -> tuple[str, str]:
        key, value = (uuid.UUID(int=request.rng.getrandbits(128), version=4) for _ in range(2))
        return str(key), str(value)

    return _kv(request, pair)


def _kv_names(request: _Request) -> TaskDocument:
    return _kv(request, lambda: (_name(request.rng), _digits(request.rng, 6)))


VARIABLE_HOPS = 2
"""Assignments from a variable to its number, in held-out instances."""


def _variables(request: _Request) -> TaskDocument:
    """Chains a = 1234, b = a, c = b: the lines of each in order, all chains interleaved."""
    rng = request.rng
    chains = max(2, min(8, request.tokens // 100))
    numbers = iter(rng.sample(range(1000, 10_000), chains * VARIABLE_HOPS))
    lines: list[tuple[float, str]] = []
    values: dict[str, str] = {}
    for _ in range(chains):
        value = source = _digits(rng, 4)
        times = sorted(rng.random() for _ in range(VARIABLE_HOPS))
        for time in times:
            variable = f"var_{next(numbers)}"
            lines.append((time, f"{variable} = {source}\n"))
            source = variable
        values[source] = value
    text = _hide([line for _, line in sorted(lines)], request)
    asked = rng.sample(sorted(values), min(request.questions, len(values)))
    return TaskDocument(
        text=text, questions=tuple((f"What is the value of {v}?", values[v]) for v in asked)
    )


def _sorting(request: _Request) -> TaskDocument:
    numbers = request.rng.sample(range(10, 100), 6)
    text = _hide([f"Add {number} to the list.\n" for number in numbers], request)
    question = "What are the numbers of the list in ascending order?"
    answer = ", ".join(str(number) for number in sorted(numbers))
    return TaskDocument(text=text, questions=((question, answer),))


_GENERATORS: dict[str, Callable[[_Request], TaskDocument]] = {
    "passkey": _passkey,
    "needle": _needle,
    "multi_needle": _multi_needle,
    "kv_names": _kv_names,
    "kv_uuid": _kv_uuid,
    "variables": _variables,
    "sorting": _sorting,
}

TASKS = tuple(_GENERATORS)
"""Names for `make_task`."""
