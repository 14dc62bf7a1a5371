"""Compare ways to federate LoRA adapters: docs/adapters-table.md, from docs/adapters-table.json.

    python tools/measure/adapters.py --data DIR [--keep build/adapters]

DIR holds CIFAR-100. A network is trained on other examples first, and kept in a folder; then its
adapters are trained by clients. Rates are chosen on a seed of their own, by validation. What the
JSON file has already is not run again.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from feddkd import divide, lora, simulate
from feddkd.data.sources.registry import SOURCES
from feddkd.reports.formats import piped
from feddkd.reports.statistics import holm, paired
from feddkd.runs.summary import best_row

DOCS = Path(__file__).parents[2] / "docs"
FILE, PAGE = DOCS / "adapters-table.json", DOCS / "adapters-table.md"
SEEDS, TUNED_ON = range(5), 100
STEPS = 5  # J
RATES, GAMMAS = (0.003, 0.01), (0.2, 1.0)
WIDTH = 48
AVERAGE, B_ALONE, EXACT = "fedavg", "fedavg, A frozen (FFA-LoRA)", "fedex_lora"
TAUGHT, LABELS, SHORT = "fedavg | dkd", "fedavg | dkd, labels", "fedavg, short rounds"
EXACT_TAUGHT = "fedex_lora | dkd"
LINES = (AVERAGE, B_ALONE, EXACT, SHORT, TAUGHT, LABELS, EXACT_TAUGHT)
COLUMNS = ("run", "rate", "gamma", "comms", "steps", "MB", "best", "last")
AT = ("best", "last")
TESTS = ("run", "against", "at", "difference", "95 %", "above in", "p")
PAIRS = (
    (TAUGHT, AVERAGE), (TAUGHT, B_ALONE), (TAUGHT, EXACT), (TAUGHT, SHORT), (TAUGHT, LABELS),
    (EXACT, AVERAGE), (EXACT_TAUGHT, TAUGHT),
)  # fmt: skip
HEAD = """# Adapters, measured

Ten clients train the [LoRA adapters](adapters.md) of a network that was trained on other examples
first. `python tools/measure/adapters.py` writes this page from docs/adapters-table.json.

* **Pictures: DKD is ahead of averaging at the end** (31.5 % to FedAvg's 25.3 %, FedEx-LoRA's 26.3 %
  and 24.6 % of short rounds with as many communications and more steps). At the best validation
  round the differences are within noise.
* **The teachers are not the cause**: labels in their place give 33.2 %.
* **Averaging the products exactly did not help**: FedEx-LoRA is level with averaging the factors on
  pictures, and a little worse on texts, with several times the bytes. FFA-LoRA sends least.
* Texts have not been run with DKD, labels or short rounds on all seeds. Clients of different ranks
  have not been tried.

Both jobs are scaled down to what a shared CPU does in minutes. *Pictures*: CIFAR-100 averaged to
16 x 16; a Vision Transformer of two blocks of width 48, trained first on 12,000 pictures of 80
classes, not a large pretrained one; 700 training and 400 test pictures of the other 20 classes,
Dirichlet 0.1; 6 rounds, E = 2. *Texts*: characters of a fixed grammar; a causal Transformer of two
blocks, trained first on a speaker without favourite words; ten speakers with 48 lines of 32
characters each; 8 rounds, E = 3. Adapters have rank 4; J = 5; the local optimiser is Adam.

For each line two local rates were tried, or two gammas with the local rate of its base, on one seed
more, by validation. In most lines the larger local rate was chosen, so rates are not tuned to the
end. The best round is chosen by about a hundred validation examples. Of five seeds: mean ± population standard deviation. Accuracy in %; perplexity, where lower is better. Steps
are those of the average client; differences are paired by seed; p is the t-test's, corrected by
Holm's method."""
BASES = {TAUGHT: AVERAGE, LABELS: AVERAGE, EXACT_TAUGHT: EXACT}  # whose local rate is taken


class Block(nn.Module):
    """A block of attention, and a layer at each position."""

    def __init__(self, width: int, causal: bool, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
        return out


class Transformer(nn.Module):
    """A Vision Transformer on patches, or a causal one on characters."""

    def __init__(self, first: nn.Module, places: int, width: int, classes: int, causal: bool):
        super().__init__()
        self.first, self.causal = first, causal
        self.places = nn.Parameter(torch.randn(places, width) / 10)
        self.blocks = nn.Sequential(Block(width, causal), Block(width, causal))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.flatten(2).transpose(1, 2) if not self.causal else x
        x = self.norm(self.blocks(x + self.places))
        logits: Tensor = self.head(x if self.causal else x.mean(1))
        return logits


@dataclass(frozen=True)
class Job:
    """A network, what it is trained on first, and how its data are divided by a seed."""

    title: str
    task: str
    metric: str
    rounds: int
    epochs: int
    batch: int
    short: int  # local steps of a short round
    first_epochs: int  # of the first training
    build: Callable[[], nn.Module]
    first: Callable[[Path], tuple[Tensor, Tensor]]
    federation: Callable[[Path, int], Any]
    adapters: dict[str, Any]


# --- pictures


def pictures(root: Path, classes: range, train: bool, each: int) -> tuple[Tensor, Tensor]:
    """Return pictures of 16 x 16 of some classes of CIFAR-100."""
    data = SOURCES.one("cifar100").load(root)
    examples = data.train if train else data.test
    x, y = examples.x, examples.y
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    rows = torch.cat([(y == label).nonzero()[:each, 0] for label in classes])
    small = avg_pool2d(x[rows].float() / 255, 2)
    return (small - 0.48) / 0.25, y[rows] - classes.start


def picture_clients(root: Path, seed: int) -> Any:
    """Return ten clients of the last twenty classes, divided by Dirichlet .1."""
    classes = range(80, 100)
    data = pictures(root, classes, True, 35), pictures(root, classes, False, 20)
    return divide(data, "dirichlet(alpha=0.1)", 10, validation=0.15, seed=seed)


# --- texts


def texts(root: Path) -> tuple[Tensor, Tensor]:
    """Return the texts of a speaker without favourite words."""
    train = SOURCES.one("grammar(speakers=1, lines=2500, skew=0)").load(None).train
    assert isinstance(train.x, Tensor)
    assert isinstance(train.y, Tensor)
    return train.x, train.y


def text_clients(root: Path, seed: int) -> Any:
    """Return ten speakers with favourite words and sentences."""
    source = "grammar(speakers=10, lines=60, skew=6)"
    return divide(source, "domains()", clients=10, validation=0.15, seed=seed)


JOBS = {
    "pictures": Job(
        "Pictures: CIFAR-100, a small Vision Transformer",
        "classification",
        "accuracy",
        rounds=6,
        epochs=2,
        batch=32,
        short=2,
        first_epochs=8,
        build=lambda: Transformer(nn.Conv2d(3, WIDTH, 4, 4), 16, WIDTH, 80, causal=False),
        first=lambda root: pictures(root, range(80), True, 150),
        federation=picture_clients,
        adapters={"rank": 4},
    ),
    "texts": Job(
        "Texts: speakers of a grammar, a small causal Transformer",
        "language",
        "perplexity",
        rounds=8,
        epochs=3,
        batch=16,
        short=2,
        first_epochs=4,
        build=lambda: Transformer(nn.Embedding(28, WIDTH), 32, WIDTH, 28, causal=True),
        first=texts,
        federation=text_clients,
        adapters={"rank": 4, "trained": ""},
    ),
}


def trained_first(job: Job, root: Path, file: Path) -> nn.Module:
    """Return the network after its first training, from the file if it is there."""
    torch.manual_seed(0)
    net = job.build()
    if not file.exists():
        x, y = job.first(root)
        optimiser = torch.optim.Adam(net.parameters(), lr=0.002)
        for _ in range(job.first_epochs):
            for rows in torch.split(torch.randperm(len(x)), 64):
                loss = cross_entropy(net(x[rows]).flatten(0, -2), y[rows].flatten())
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        print(f"{job.title}: loss {loss.item():.3f} at the end of the first training")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(net.state_dict(), file)
    net.load_state_dict(torch.load(file))
    return net


def text_of(line: str, job: Job, rate: float, gamma: float) -> str:
    """Return the method of a line of the table."""
    local = f"batch_size={job.batch}, optimiser='adam', lr={rate})"
    if line == SHORT:
        return f"fedavg(steps={job.short}, {local}"
    first = "fedex_lora" if line in (EXACT, EXACT_TAUGHT) else "fedavg"
    if line not in BASES:
        return f"{first}(epochs={job.epochs}, {local}"
    teacher = ", teacher='labels'" if line == LABELS else ""
    taught = f"dkd(steps={STEPS}, batch_size=64, lr={gamma}{teacher})"
    return f"{first}(epochs={job.epochs}, {local} | {taught}"


def play(job: Job, net: nn.Module, federation: Any, line: str, run: "Run") -> dict[str, Any]:
    """Return the numbers of one run."""
    exact, times = line in (EXACT, EXACT_TAUGHT), STEPS + 1 if line == SHORT else 1
    factors: Literal["B", "both"] = "B" if line == B_ALONE else "both"

    def build() -> nn.Module:
        adapted = lora(net, **job.adapters, factors=factors, residual=exact)
        if job.task == "classification":  # other classes than before
            setattr(adapted, "head", nn.Linear(WIDTH, 20))  # noqa: B010
        return adapted

    begun = time.process_time()
    result = simulate(
        model=build,
        clients=federation,
        task=job.task,
        method=text_of(line, job, run.rate, run.gamma),
        rounds=job.rounds * times,
        evaluate_every=times,
        seed=run.seed,
        engine="serial",
        progress=False,
    )
    best, last = best_row(result.history), result.history[-1]
    return {
        "line": line,
        **run._asdict(),
        "best": best[f"test_{job.metric}"],
        "last": last[f"test_{job.metric}"],
        "validation": best[f"validation_{job.metric}"],
        "communications": last["communications"],
        "steps": last["local_steps"],
        "bytes": last["bytes_up"] + last["bytes_down"],
        "seconds": round(time.process_time() - begun, 1),
    }


class Run(NamedTuple):
    """What differs between the runs of a line."""

    seed: int
    rate: float
    gamma: float


def measure(name: str, root: Path, keep: Path, done: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield the numbers of all runs of a job; those in `done` are not run again."""
    job, chosen = JOBS[name], dict[str, tuple[float, float]]()
    net = trained_first(job, root, keep / f"{name}.pt")
    federations = {seed: job.federation(root, seed) for seed in (*SEEDS, TUNED_ON)}

    def numbers(line: str, run: Run) -> dict[str, Any]:
        key = {"line": line, **run._asdict()}
        old = (one for one in done if key.items() <= one.items())
        return next(old, None) or play(job, net, federations[run.seed], line, run)

    for line in LINES:
        trials = []
        for rate, gamma in settings(line, chosen):
            trials.append(numbers(line, Run(TUNED_ON, rate, gamma)))
            yield trials[-1]
        sign = 1 if job.metric == "accuracy" else -1
        best = max(trials, key=lambda trial: sign * trial["validation"])
        chosen[line] = best["rate"], best["gamma"]
        for seed in SEEDS:
            yield numbers(line, Run(seed, *chosen[line]))


def settings(line: str, chosen: dict[str, tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the rates (of local training, of DKD) that are tried for a line."""
    if line == EXACT_TAUGHT:
        return [(chosen[EXACT][0], chosen[TAUGHT][1])]
    if line in BASES:
        return [(chosen[BASES[line]][0], gamma) for gamma in GAMMAS]
    return [(rate, 0.0) for rate in RATES]


# --- the page


def page(kept: dict[str, list[dict[str, Any]]]) -> str:
    """Return the tables."""
    parts = [HEAD]
    for name, runs in kept.items():
        counted = [run for run in runs if run["seed"] in SEEDS]
        whole = [line for line in LINES if len([r for r in counted if r["line"] == line]) == 5]
        parts += [f"## {JOBS[name].title}", piped(COLUMNS, [*_lines(name, counted, whole)])]
        parts += [piped(TESTS, [*_tests(name, counted, whole)])]
        if missing := [line for line in LINES if line not in whole]:
            parts += [f"Not run yet: {'; '.join(missing)}."]
    return "\n\n".join(parts) + "\n"


Runs = list[dict[str, Any]]


def _lines(name: str, runs: Runs, whole: list[str]) -> Iterator[list[str]]:
    for line in whole:
        of = [run for run in runs if run["line"] == line]
        first = of[0]
        gamma = f"{first['gamma']:g}" if line in BASES else "-"
        values = [[_scaled(name, run[key]) for run in of] for key in ("best", "last")]
        spent = [f"{fmean(run[key] for run in of):,.0f}" for key in ("communications", "steps")]
        size = f"{fmean(run['bytes'] for run in of) / 1e6:,.3g}"
        digits = 2 if JOBS[name].metric == "accuracy" else 3
        means = [f"{fmean(value):.{digits}f} ± {pstdev(value):.{digits}f}" for value in values]
        yield [line, f"{first['rate']:g}", gamma, *spent, size, *means]


def _tests(name: str, runs: Runs, whole: list[str]) -> Iterator[list[str]]:
    """Yield a row for each comparison, with p corrected by Holm's method."""

    def values(line: str, at: str) -> dict[int, float]:
        return {run["seed"]: _scaled(name, run[at]) for run in runs if run["line"] == line}

    pairs = [pair for pair in PAIRS if {*pair} <= {*whole}]
    made = [(at, *two, paired(*(values(line, at) for line in two))) for two in pairs for at in AT]
    chances = holm([test.t_p for *_, test in made if test and test.t_p is not None])
    for (at, ours, theirs, test), chance in zip(made, chances, strict=True):
        assert test is not None
        d = test.difference
        interval = f"{d.low:+.3g} to {d.high:+.3g}"
        ahead = f"{test.wins} of {d.n}"
        yield [ours, theirs, at, f"{d.mean:+.3g}", interval, ahead, f"{chance:.2g}"]


def _scaled(name: str, value: float) -> float:
    return 100 * value if JOBS[name].metric == "accuracy" else value


def main() -> None:
    """Run what is not in the JSON file yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--keep", type=Path, default=Path("build/adapters"))
    parser.add_argument("jobs", nargs="*", default=[*JOBS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.jobs:
        kept = json.loads(FILE.read_text()) if FILE.exists() else {}
        runs: list[dict[str, Any]] = []
        for run in measure(name, given.data, given.keep, kept.get(name, [])):
            runs.append(run)
            print(run, flush=True)
        kept = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps({**kept, name: runs}, indent=1) + "\n")
        PAGE.write_text(page({**kept, name: runs}))


if __name__ == "__main__":
    main()
