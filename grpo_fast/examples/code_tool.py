"""A tool with which the model runs Python code: `rollout.tools: [grpo_fast.examples.code_tool:run_python]`.

The program runs in a sandbox: bubblewrap, or a container of docker or podman. Importing this module starts
the sandbox once, and raises ImportError where none of them works.
"""

import shutil
import subprocess
import sys
import tempfile

SECONDS, MEMORY = 10, 2**30  # of one program, by the clock and in bytes
CHARACTERS = 4000  # of an answer; the middle of a longer one is left out
IMAGE = "python:3.12-slim"  # of the container
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")  # what bubblewrap shows, besides Python


def bubblewrap() -> list[str]:
    """A command prefix: no network, no processes but its own, and no writable file but those in /tmp."""
    shown = [part for path in SYSTEM for part in ("--ro-bind-try", path, path)]
    for path in (sys.base_prefix, sys.prefix):
        shown += ["--ro-bind", path, path]
    limited = ["/bin/sh", "-c", f'ulimit -v {MEMORY // 1024}; exec "$@"', "sh"]
    isolated = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    folders = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *shown, "--chdir", "/tmp"]
    return [*limited, "bwrap", *isolated, *folders, *_python(sys.executable)]


def container(program: str) -> list[str]:
    """The same by docker or podman, which also limit the number of processes."""
    limits = ["--network=none", f"--memory={MEMORY}", "--pids-limit=64", "--read-only", "--tmpfs=/tmp"]
    rights = ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=65534:65534"]
    return [program, "run", "--rm", "-i", "--workdir=/tmp", *limits, *rights, IMAGE, *_python("python")]


def find_sandbox() -> list[str]:
    """Return the first command that runs a program from its standard input; raise ImportError without one."""
    commands = {"bwrap": bubblewrap(), "docker": container("docker"), "podman": container("podman")}
    for program, command in commands.items():
        if shutil.which(program) and not subprocess.run(command, input=b"", capture_output=True).returncode:
            return command
    raise ImportError("run_python needs a sandbox: install bubblewrap, or docker or podman, for this user")


def _python(executable: str) -> list[str]:
    return ["timeout", "--signal=KILL", str(SECONDS), executable, "-I", "-X", "utf8", "-"]


SANDBOX = find_sandbox()


def run_python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program. It starts anew each time, in an empty folder.
    """
    with tempfile.TemporaryFile() as program:
        program.write(code.encode(errors="replace"))
        program.seek(0)
        with subprocess.Popen(
            SANDBOX, stdin=program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            text = process.stdout.read(2**20).decode(errors="replace")
            if process.stdout.read(1):  # the program prints without end
                process.kill()
    if len(text) > CHARACTERS:  # beginning and end: the end of an error says what it was
        half = CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    end = f"[stopped after {SECONDS} seconds]" if process.returncode in (-9, 137) else ""
    return text + end or "[nothing was printed]"
