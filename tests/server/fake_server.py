"""Run `serve` over the fake engine: PORT DRAIN_TIMEOUT_S TOKEN_DELAY_S LOAD_S."""

import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.server.fake_engine import FakeEngine

from echokv.engine.tokenizer import Tokenizer
from echokv.log import setup
from echokv.server.lifecycle import serve


def main() -> None:
    port, drain_timeout_s, token_delay_s, load_s = map(float, sys.argv[1:])
    setup()
    with tempfile.TemporaryDirectory() as directory:
        write_byte_tokenizer(Path(directory))
        tokenizer = Tokenizer.from_dir(directory)
    engine = FakeEngine(tokenizer, ready=False, token_delay_s=token_delay_s, load_s=load_s)
    asyncio.run(serve(engine, host="127.0.0.1", port=int(port), drain_timeout_s=drain_timeout_s))


if __name__ == "__main__":
    main()
