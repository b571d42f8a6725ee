"""Exceptions of this project, in one hierarchy.

- ClawError
  - ConfigError: a setting is wrong; the sentence names it and says what works
    - ModelFileError: a model folder is missing, incomplete or corrupted
  - RequestError: the client asked for something we cannot do (HTTP 4xx)
    - ContextLengthError: the prompt does not fit the model's context
  - AlignmentError: scores do not fit their tokens, or are no numbers
  - LedgerError: the ledger cannot be opened, read or written, or holds another run
  - ForgottenError: what was to be written is about a turn that was forgotten meanwhile
  - UndoError: it cannot be undone or exported as asked
  - JudgeError: the judge's endpoint failed for good
  - BackendError: a trainer or sampler failed
    - SamplerError: one generation failed; the request may be tried again
      - GoneError: the service has these weights no more
    - StepError: an optimizer step failed: it is void
      - VoidStepError (ledger/steps.py): it is void for another reason than a failure
    - LearningEndedError: to go on would do harm or no good: learning ends until a restart
    - OutageError: the service is away or refuses for a time: wait, then go on

Rule: foreign exceptions are mapped once, at the edge, with `raise ... from`.
"""

from collections.abc import Mapping
from http import HTTPStatus

EXIT_INTERRUPTED = 130


class ClawError(Exception):
    """Root of the tree. `str(error)` is a sentence that a user can act on."""


class ConfigError(ClawError):
    """A setting is wrong, or two settings exclude one another."""


class ModelFileError(ConfigError):
    """A model folder is missing, incomplete or corrupted."""


class RequestError(ClawError):
    """The request cannot be served as asked. Each wire format reports it in its own shape.

    Args:
        status: HTTP status.
        code: short name for programs (invalid_api_key, context_length_exceeded ...).
        param: the field that the error is about.
        headers: sent with the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers


class ContextLengthError(RequestError):
    """Prompt and reply do not fit; agents compact their history on this code and wording."""

    def __init__(self, prompt_tokens: int, reply_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens; "
            f"the prompt has {prompt_tokens} and {reply_tokens} were asked for the reply.",
            code="context_length_exceeded",
            param="messages",
        )


class AlignmentError(ClawError):
    """Arrays over the same tokens differ in length. Nothing is padded or cut to make them fit."""


class LedgerError(ClawError):
    """The ledger cannot be opened or written, or belongs to another model or method."""


class ForgottenError(ClawError):
    """Something that was to be written is about a turn that was forgotten meanwhile."""


class UndoError(ClawError):
    """Something cannot be undone or exported as asked; the sentence says what can."""


class JudgeError(ClawError):
    """The judge's endpoint failed, after all retries."""


class BackendError(ClawError):
    """A trainer or a sampler failed."""


class SamplerError(BackendError):
    """Raised when one generation failed."""


class GoneError(SamplerError):
    """The service has a sampler's weights no more, as where somebody deleted them."""


class StepError(BackendError):
    """An optimizer step failed; the weights are suspect until a committed state is loaded."""


class LearningEndedError(BackendError):
    """Learning ended on purpose until a restart: to continue would do harm or no good."""


class OutageError(BackendError):
    """The service behind a backend does not answer, or refuses for a time.

    The request itself was correct: the caller waits and retries, and no sample is blamed for it.
    """


def same_length(what: str, **arrays: object) -> int:
    """Return the one length that all `arrays` share.

    Raises:
        AlignmentError: naming every length, when they differ.
    """
    lengths = {name: len(value) for name, value in arrays.items()}  # type: ignore[arg-type]
    if len(set(lengths.values())) > 1:
        raise AlignmentError(f"{what}: lengths differ: {lengths}")
    return next(iter(lengths.values()))


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of a group, however deeply nested; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        group: BaseExceptionGroup[BaseException] = error
        error = group.exceptions[0]
    return error
