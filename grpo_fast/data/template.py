"""Chat templates: rendering, the first time in a process with limits, and the end of a turn."""

from __future__ import annotations

import os
import re
import select
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpo_fast.data.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_SECONDS = 10  # of the processor; a template takes a millisecond
LIMIT_BYTES = 1 << 30  # beyond what the process has
LIMIT_CHARACTERS = 1 << 24
MARK = "c41f8e"  # a text that nobody writes by chance


def render(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
    asks: bool = True,
    begun: bool = False,
    tries: bool = False,
) -> str:
    """Return the text that the chat template makes of a conversation.

    Args:
        options: further variables of the template, `dataset.chat_template_kwargs`.
        asks: the assistant's turn is begun at the end.
        begun: the last message is continued.
        tries: render in a process with limits, because the template may have no end.

    Raises:
        ValueError: the template exceeds a limit.
        Exception: whatever else the template raises; ValueError from a process.
    """

    def text() -> str:
        return str(
            tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools or ()) or None,
                tokenize=False,
                add_generation_prompt=asks,
                continue_final_message=begun,
                **(options or {}),
            )
        )

    return _tried(text) if tries and hasattr(os, "fork") else text()


def _tried(work: Any) -> str:
    """Return what `work` returns in a forked process; raise its error as a ValueError."""
    incoming, outgoing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child needs none of their locks
        child = os.fork()
    if child == 0:
        _work_within_limits(work, outgoing)
    os.close(outgoing)
    reply, deadline = b"", time.monotonic() + 12 * LIMIT_SECONDS
    with open(incoming, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := file.read(1 << 16)):
                break
            reply += part
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not reply:
        raise ValueError(
            f"it takes more than {LIMIT_SECONDS} seconds, {LIMIT_BYTES >> 30} GiB or {LIMIT_CHARACTERS:,} "
            "characters: look for a loop or a macro without end"
        )
    kind, text = reply[:1], reply[1:].decode("utf-8", "surrogatepass")
    if kind == b"!":
        raise ValueError(text)
    return text


def _work_within_limits(work: Any, outgoing: int) -> None:
    """Write the result of `work`, or its error after a `!`; write nothing where it exceeds a limit."""
    import resource

    try:
        size = LIMIT_BYTES
        with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
            size += int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_SECONDS, LIMIT_SECONDS + 1))
        try:
            reply = f"={work()}"
        except (MemoryError, OverflowError, RecursionError):
            reply = ""
        except Exception as error:
            reply = f"!{error}"
        if len(reply) <= LIMIT_CHARACTERS:
            with open(outgoing, "wb") as file:
                file.write(reply.encode("utf-8", "surrogatepass"))
    finally:
        os._exit(0)


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the Jinja text; of several named templates, all."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(map(str, template.values()))


def variables_of(template: str) -> set[str]:
    """Return the names that a template reads from `dataset.chat_template_kwargs`."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    plain = re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", template)
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError:  # rendering says where
        return set()
    given = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    return {name for name in meta.find_undeclared_variables(parsed) - given if not name.endswith("_token")}


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token with which the chat template ends the assistant's turn; None without one."""
    return _turn_end(tokenizer, template_of(tokenizer))


@lru_cache(maxsize=32)
def _turn_end(tokenizer: PreTrainedTokenizerBase, template: str) -> int | None:
    if not template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    try:
        text = render(tokenizer, turns, asks=False, tries=True)
    except Exception:  # it is said where the template is used
        return None
    _, shown, after = text.rpartition(MARK)
    added = tokenizer.added_tokens_decoder.items() if shown else ()
    ends = {token.content: index for index, token in added if after.lstrip().startswith(token.content)}
    return ends[max(ends, key=len)] if ends else None
