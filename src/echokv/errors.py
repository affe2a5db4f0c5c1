"""The errors that echokv raises on purpose, by whose move is next.

Each message carries the numbers: what was asked for, what the limit is, which flag changes it.
"""


class EchoKVError(Exception):
    """Base of every error that echokv raises on purpose."""


class ConfigError(EchoKVError):
    """The user asked for something that can't be: a flag, a config or a checkpoint to change."""


class CheckpointError(ConfigError):
    """A checkpoint directory is broken; the message names the file and, where known, the tensor."""


class CapacityError(EchoKVError):
    """Memory does not suffice; the message says how much was needed, how much there was."""


class KernelUnavailable(EchoKVError):
    """A backend that was asked for can't run on this machine; the message says why."""


class RequestError(EchoKVError):
    """One request is unacceptable; nothing else is affected.

    Args:
        message: what is wrong, with the value and the limit.
        param: the request field at fault, in OpenAI's names, or None.
        code: a short machine-readable reason such as `context_length_exceeded`, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
