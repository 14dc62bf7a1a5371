"""Feed damaged input to everything that reads what users write or download: `make fuzz`.

Good input of each kind is damaged: pieces are cut out, doubled, or replaced by noise and by words
of the language. It may be read or refused by an InputError; anything else (a traceback, a hang) is
a finding. Hypothesis does the damage, and where atheris is installed, so does libFuzzer, which
follows what code its inputs reach.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

LONGEST = 10  # seconds of processor time that an input may take
MOST = 100  # seconds that libFuzzer has for a target
SEED = int(sys.argv[2]) if sys.argv[2:] and sys.argv[1].isdecimal() else 20_240_607
SCRATCH = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}"


class Target(NamedTuple):
    """Something that reads: good input for it, words that mean something to it, and how it is
    called.
    """

    good: list[bytes]
    words: list[bytes]
    read: Callable[[bytes], None]


def targets() -> dict[str, Target]:
    """Imported here, so that atheris can see what is imported."""
    from test_formats import CASES

    from feddkd.experiment import KEYS, load
    from feddkd.methods import METHODS, parse

    def experiment(content: bytes) -> None:
        SCRATCH.write_bytes(content)
        load(SCRATCH)

    def method(content: bytes) -> None:
        made = parse(content.decode("utf-8", "surrogateescape"))
        assert parse(made.canonical) == made == parse(str(made))

    def reader(name: str) -> Callable[[bytes], None]:
        def read(content: bytes) -> None:
            SCRATCH.write_bytes(content)
            CASES[name].read(SCRATCH)

        return read

    root = Path(__file__).parents[1]
    options = sorted({option for name in METHODS for option in METHODS.options(name)})
    texts = [METHODS[name]().canonical for name in METHODS]
    words = [*METHODS, *options, *texts, "|", "(", ")", "=", ",", "'", "1e400", "-1"]
    lines = [
        *KEYS,
        "[sweep]",
        "[[",
        "]]",
        "'''",
        '"',
        "1979-05-27",
        "nan",
        "inf",
        "=",
        "saved(path='x')",
        "9" * 30,
        "true",
    ]
    files = [path.read_bytes() for path in sorted(root.glob("examples/*.toml"))]
    files += [files[0].decode().encode(other) for other in ("utf-8-sig", "utf-16")]
    return {
        "experiment loader": Target(files, [word.encode() for word in lines + words], experiment),
        "method parser": Target(
            [f"{one} | dkd()".encode() for one in texts], [word.encode() for word in words], method
        ),
        **{
            f"reader of {name}": Target([case.content], [case.content[:64]], reader(name))
            for name, case in CASES.items()
        },
    }


@st.composite
def damaged(draw: st.DrawFn, target: Target) -> bytes:
    content = draw(st.sampled_from(target.good))
    pieces = st.binary(max_size=8) | st.sampled_from(target.words)
    # None: as long as what comes in its place, so that lengths still fit
    cuts = st.none() | st.integers(0, 60)
    for at, cut, piece in draw(st.lists(st.tuples(st.floats(0, 1), cuts, pieces), max_size=6)):
        place = int(at * len(content))
        content = content[:place] + piece + content[place + (len(piece) if cut is None else cut) :]
    return content


class HangError(BaseException):
    """Not an Exception: readers turn those into refusals."""


class Tried:
    """Counts what has become of the inputs."""

    def __init__(self, target: Target) -> None:
        self.target, self.accepted, self.refused, self.slowest = target, 0, 0, 0.0
        # so that what it imports is there before anybody looks at the clock
        target.read(target.good[0])

    def __call__(self, content: bytes) -> None:
        from feddkd.errors import InputError

        started = time.process_time()
        try:
            with deadline():
                self.target.read(content)
            self.accepted += 1
        except InputError:
            self.refused += 1
        self.slowest = max(self.slowest, time.process_time() - started)

    def __str__(self) -> str:
        total = self.accepted + self.refused
        return (
            f"{total:,} inputs, {self.accepted:,} read, {self.refused:,} refused, the slowest in"
            f" {self.slowest:.2f} s"
        )


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    def late(*_: object) -> None:
        raise HangError(f"it took more than {LONGEST} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LONGEST)  # of this process: others may be busy
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def by_hypothesis(target: Target, inputs: int) -> Tried:
    tried = Tried(target)

    @seed(SEED)
    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(damaged(target))
    def try_all(content: bytes) -> None:
        tried(content)

    try:
        try_all()
    finally:
        SCRATCH.unlink(missing_ok=True)
    return tried


def by_atheris(name: str, inputs: int) -> None:
    """This process becomes libFuzzer's, and ends with it."""
    import atheris

    with atheris.instrument_imports(include=["feddkd"]):
        target = targets()[name]
    with tempfile.TemporaryDirectory() as corpus:
        for number, content in enumerate(target.good):
            (Path(corpus) / str(number)).write_bytes(content)
        options = (
            f"-runs={inputs} -seed={SEED} -timeout={LONGEST} -max_total_time={MOST} -max_len=40000"
            f" -artifact_prefix={SCRATCH}-"
        )
        atheris.Setup([sys.argv[0], *options.split(), corpus], Tried(target))
        atheris.Fuzz()


def has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def main(inputs: int) -> None:
    for name, target in targets().items():
        print(f"{name}: {by_hypothesis(target, inputs)} (hypothesis, seed {SEED})", flush=True)
    if not has_atheris():
        sys.exit("atheris is not installed: pip install 'feddkd[fuzz]' for coverage-guided fuzzing")
    for name in targets():
        command = [sys.executable, __file__, "--atheris", name, str(25 * inputs)]
        with tempfile.TemporaryDirectory() as place:  # libFuzzer ends without a chance to clear up
            done = subprocess.run(
                command, env={**os.environ, "TMPDIR": place}, capture_output=True, text=True
            )
        if done.returncode:
            sys.exit(f"{name}: a finding\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        told = [line for line in done.stderr.splitlines() if line.startswith("Done ")]
        print(f"{name}: {told[-1].removeprefix('Done ')} (atheris, seed {SEED})", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--atheris"]:
        by_atheris(sys.argv[2], int(sys.argv[3]))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 2_000)
