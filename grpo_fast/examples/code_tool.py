"""A tool that runs the model's Python code: `rollout.tools: [grpo_fast.examples.code_tool:run_python]`.

The program runs in a sandbox: bubblewrap, or a container of docker or podman. Importing this module starts
the sandbox once, and raises ImportError if none of them works.
"""

import shutil
import subprocess
import sys
import tempfile

SECONDS, MEMORY = 10, 2**30  # limits of one program; bytes
CHARACTERS = 4000  # of the output; the middle of a longer one is left out
IMAGE = "python:3.12-slim"  # of the container
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")  # visible in bubblewrap, besides Python


def bubblewrap() -> list[str]:
    """Return a command without network, other processes, and writable files outside /tmp."""
    shown = [part for path in SYSTEM for part in ("--ro-bind-try", path, path)]
    for path in (sys.base_prefix, sys.prefix):
        shown += ["--ro-bind", path, path]
    limited = ["/bin/sh", "-c", f'ulimit -v {MEMORY // 1024}; exec "$@"', "sh"]
    isolated = ["--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    folders = ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *shown, "--chdir", "/tmp"]
    return [*limited, "bwrap", *isolated, *folders, *_python(sys.executable)]


def container(program: str) -> list[str]:
    """Return such a command of docker or podman, which also limits the number of processes."""
    limits = ["--network=none", f"--memory={MEMORY}", "--pids-limit=64", "--read-only", "--tmpfs=/tmp"]
    rights = ["--cap-drop=ALL", "--security-opt=no-new-privileges", "--user=65534:65534"]
    return [program, "run", "--rm", "-i", "--workdir=/tmp", *limits, *rights, IMAGE, *_python("python")]


def find_sandbox() -> list[str]:
    """Return the first command that works, which runs a program from stdin, or raise ImportError."""
    commands = {"bwrap": bubblewrap(), "docker": container("docker"), "podman": container("podman")}
    for program, command in commands.items():
        if shutil.which(program) and not subprocess.run(command, input=b"", capture_output=True).returncode:
            return command
    raise ImportError("run_python needs a sandbox: install bubblewrap, or docker or podman, for this user")


def _python(executable: str) -> list[str]:
    return ["timeout", "--signal=KILL", str(SECONDS), executable, "-I", "-X", "utf8", "-"]


SANDBOX = find_sandbox()


def run_python(code: str) -> str:
    """Run a Python program and return what it prints.

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
            if process.stdout.read(1):  # too much output
                process.kill()
    if len(text) > CHARACTERS:  # keep the end, which has the error
        half = CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    end = f"[stopped after {SECONDS} seconds]" if process.returncode in (-9, 137) else ""
    return text + end or "[nothing was printed]"
