"""A program that compares answers with math-verify: one question a line in, one answer a line out.

A question is the JSON list [label, answer, is_marked]; the answer is true, false, or null where the time was up. The
work is done by a forked child with a limit on its processor time; the kernel ends it at the limit, and the next child
is forked from this process, in which everything is imported and warm. It imports nothing of strop, so that it starts
fast.
"""

import json
import os
import signal
import sys

from math_verify import parse, verify

# For one question, so that there is a score within 1 s of wall clock; honest answers take less than 0.15 s.
MAX_CPU_S = 0.5


def is_equal(label: str, answer: str, is_marked: bool) -> bool:
    """Whether math-verify takes the answer for the label."""
    gold = parse(f"${label}$", parsing_timeout=0)
    found = parse(f"${answer}$" if is_marked else answer, parsing_timeout=0)
    return bool(verify(gold, found, timeout_seconds=0))


def serve(questions: int, answers: int) -> None:
    """Answer until there are no more questions."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while line := _read_line(questions):
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        try:
            verdict = is_equal(*json.loads(line))
        except (Exception, RecursionError):  # noqa: BLE001  whatever a strange text does to sympy: not equal
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(answers, json.dumps(verdict).encode() + b"\n")


def _read_line(questions: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(questions, 65536)
        if not part:
            return b""
        line += part
    return line


def main() -> None:
    answers, questions = os.dup(1), 0
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    for label, answer in ((r"\frac{1}{2}", "0.5"), ("x^2+2x+1", "(x+1)^2"), ("(1,2)", "(1, 2)"), (r"\sqrt{8}", "7")):
        is_equal(label, answer, True)
    while True:
        child = os.fork()
        if child == 0:
            serve(questions, answers)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))
        os.write(answers, b"null\n")


if __name__ == "__main__":
    main()
