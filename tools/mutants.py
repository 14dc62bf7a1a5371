"""Break the code on purpose, one thing at a time, and see a test fail for each: `make mutants`.

Each mutant changes one text in one file, in a copy of the package. One that no test notices is a
hole in the tests. The list is also in docs/testing.md; a test sees to it that every mutant still
applies.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MATHEMATICS = ("tests/methods/test_laws.py", "tests/methods/test_reference.py")
DRIFT = "tests/methods/test_methods_drift.py"
RECORDINGS = ("tests/engines/test_cuda_graphs.py",)
GATHERING = ("tests/methods/test_aggregation.py",)
PRIVACY = ("tests/rounds/test_privacy.py",)
FAULTS = ("tests/rounds/test_faults.py",)
POOL = ("tests/engines/test_pool.py",)
FLOWER = ("tests/flower/test_flower.py",)
DOOR = ("tests/flower/test_gateway.py",)
MASKS = ("tests/flower/test_masks.py",)
SECURE = ("tests/flower/test_secure.py",)
OWN_NETWORKS = ("tests/models/test_own_networks.py",)
KINDS = ("tests/models/test_network_kinds.py",)
BASELINES = ("tests/methods/test_methods_baselines.py",)
SHARPNESS = ("tests/methods/test_methods_sharpness.py",)
PROOF = ("tests/models/test_proof.py",)


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = MATHEMATICS


MUTANTS = [
    Mutant("KL taken in the other direction", "tasks/formulas.py",
           "taught = softmax(teacher, -1)",
           "teacher, student = student, teacher\n    taught = softmax(teacher, -1)"),
    Mutant("every client taught by the first client's model", "engines/serial.py",
           "self.memo(order.run, client)", "self.memo(order.run, order.cohort[0])"),
    Mutant("teacher normalises by the batch", "methods/dkd.py", "batch.x, mode=teacher", 'batch.x, mode="batch"'),
    Mutant("student normalises by the batch", "methods/dkd.py", "batch.x, mode=student", 'batch.x, mode="batch"'),
    Mutant("local models averaged with equal weights", "methods/local.py",
           '"params": Collect.MEAN_BY_EXAMPLES', '"params": Collect.MEAN_BY_CLIENTS'),
    Mutant("distillation gradients weighted by examples", "methods/dkd.py", "MEAN_BY_CLIENTS", "MEAN_BY_EXAMPLES"),
    Mutant("distillation climbs instead of descending", "methods/dkd.py", '-rates["lr"]', 'rates["lr"]'),
    Mutant("all clients draw with one key", "engines/serial.py", "key = (*order.key, client)", "key = (*order.key, 0)"),
    Mutant("all rounds draw with one key", "rounds/exchange.py",
           "(run.seed, turn.round, exchange.index", "(run.seed, 1, exchange.index"),
    Mutant("memo lost between exchanges", "engines/serial.py", "retained(memo, exchange.retain)", "retained(memo, frozenset())"),
    Mutant("mu dropped", "methods/losses.py", "mu / 2 * total", "0 * total"),
    Mutant("mu in place of mu/2", "methods/losses.py", "mu / 2 * total", "mu * total"),
    Mutant("per-tensor mean form summed instead", "methods/losses.py", "square.sum() if form", "square.sum() if True or form"),
    Mutant("FedMAX reads logits instead of activations", "methods/losses.py",
           "log_softmax(output.features, -1)", "log_softmax(output.logits, -1)"),
    Mutant("FedMAX forgets the mean over activations", "methods/losses.py", 'size if reduction == "mean" else 1', "1"),
    Mutant("batch norm averaged under FedBN", "methods/fedbn.py",
           "local_training(local, Variant(private=private), gathering)", "local_training(local)"),
    Mutant("private tensors not carried to the next round", "method/method.py",
           'frozenset({"private"}).union', "frozenset[str]().union"),
    Mutant("learning rate decays one round early", "spec/schedules.py", "self.per_round ** (round - 1)", "self.per_round**round"),
    Mutant("no decay inside the distillation", "spec/schedules.py", " * self.per_step ** (step - 1)", ""),
    Mutant("warm-up ends one round early", "spec/schedules.py", "0 if round <= self.warmup", "0 if round < self.warmup"),
    Mutant("Nesterov ignored", "methods/optimisers/sgd.py", "if nesterov else velocity", "if False else velocity"),
    Mutant("weight decay ignored by Adam", "methods/optimisers/adam.py",
           "        grads = add(grads, params, weight_decay) if weight_decay else grads\n        count", "        count"),
    Mutant("AMSGrad ignored", "methods/optimisers/adam.py", 'after["largest" if amsgrad else "second"]', 'after["second"]'),
    Mutant("last partial batch dropped", "data/batches.py", "math.ceil(examples / self.batch_size)", "max(whole, 1)"),
    Mutant("shuffled although the batch takes in everything", "data/batches.py",
           "if reads.random and reads.shuffle and count > reads.batch_size", "if reads.random and reads.shuffle",
           ("tests/api/test_simulate.py",)),
    Mutant("unshuffled, every round begins with the same examples", "data/batches.py",
           "(int(round) + int(step) - 2)", "(int(step) - 1)", ("tests/data/test_batches.py",)),
    Mutant("a trimmed step writes over what is read again", "engines/compile/simplify.py",
           "list(operand.users) != [node]", "node not in operand.users", ("tests/engines/test_simplify.py",)),
    Mutant("lanes that have finished are left where steps go on writing", "engines/batched/folds.py",
           "copies(lane_range(carry, active, left))", "lane_range(carry, active, left)", RECORDINGS),
    Mutant("a result is left where the next round writes", "engines/batched/folds.py",
           "copies(lane_range(carry, 0, left))", "lane_range(carry, 0, left)", RECORDINGS),
    Mutant("a CUDA graph reads the tensors that were sent when it was recorded", "engines/compile/cuda_folds.py",
           "        _copy(self.sent, work.sent)\n", "", RECORDINGS),
    Mutant("a round longer than the recorded one is not recorded again", "engines/compile/cuda_folds.py",
           "or len(kept.indices) < len(work.table.active)", "or False", RECORDINGS),
    Mutant("later exchanges go to the whole cohort", "rounds/replies.py",
           "client not in missing", "client not in set()"),
    Mutant("evaluation normalises by the test batch", "rounds/evaluation.py", 'batch.x, mode="eval"', 'batch.x, mode="batch"'),
    Mutant("an exchange of DKD counted as free", "rounds/costs.py",
           "self.communications + 1", "self.communications + (phase.name == 'local')"),
    Mutant("sample instead of population standard deviation", "runs/summary.py", "statistics.pstdev(", "statistics.stdev(",
           ("tests/runs/test_record.py",)),
    Mutant("latest instead of earliest best round", "runs/summary.py", "max(history, key", "max(reversed(history), key",
           ("tests/runs/test_record.py",)),
    Mutant("SCAFFOLD's correction with the wrong sign", "methods/scaffold.py", "g: g - c_k + c,", "g: g + c_k - c,", (DRIFT,)),
    Mutant("SCAFFOLD's server forgets who stayed away", "methods/scaffold.py",
           'collected["control"], rates["share"])', 'collected["control"])', (DRIFT,)),
    Mutant("FedDyn's server forgets its slope", "methods/feddyn.py",
           'add(collected["params"], h, -1 / alpha)', 'collected["params"]', (DRIFT,)),
    Mutant("FedNova does not normalise", "methods/fednova.py", "(w_t - w_k) / a, sent", "(w_t - w_k), sent", (DRIFT,)),
    Mutant("FedNTD distils the true class, too", "methods/losses.py",
           "index + (index >= batch.y[:, None])", "index + 0 * batch.y[:, None]", (DRIFT,)),
    Mutant("MOON drawn to its previous model", "methods/losses.py",
           "softplus(-lead / temperature)", "softplus(lead / temperature)", (DRIFT,)),
    Mutant("FedGen's generator may repeat itself", "methods/losses.py",
           "(-apart.mean()).exp()", "0 * (-apart.mean()).exp()", ("tests/methods/test_methods_labels.py",)),
    Mutant("FedMA pairs the least alike", "methods/unit_matching.py",
           "maximize=True", "maximize=False", ("tests/methods/test_methods_matching.py",)),
    Mutant("FedDF's rate is not annealed", "methods/feddf.py",
           "lr * (1 + torch.cos(math.pi * done)) / 2", "lr + 0 * torch.cos(math.pi * done)", ("tests/methods/test_methods_server.py",)),
    Mutant("DKD goes on though it hurts", "methods/dkd.py",
           "better = (loss < lowest) |", "better = (loss < loss + 1) |", ("tests/methods/test_dkd.py",)),
    Mutant("examples set aside are taught all the same", "data/batches.py",
           "if reads.spare and examples > 1:", "if False:", ("tests/data/test_batches.py", "tests/methods/test_dkd.py")),
    Mutant("a bound that bounds only the parameters", "methods/aggregation.py",
           "for g, tensors in upload.items()\n        for n", "for g, tensors in list(upload.items())[:1]\n        for n", GATHERING),
    Mutant("updates within the bound stretched to it", "methods/aggregation.py",
           "norm > most, shortened", "norm > 0, shortened", GATHERING),
    Mutant("noise not divided by the number of clients", "methods/aggregation.py",
           'reach / len(rates["clients"])', "reach", GATHERING),
    Mutant("the same noise every time", "methods/aggregation.py",
           '"count": ledger["count"] + 1', '"count": ledger["count"]', GATHERING),
    Mutant("noise on a mean by examples", "methods/aggregation.py",
           "dict.fromkeys(phase.collect, Collect.MEAN_BY_CLIENTS)", "phase.collect", GATHERING),
    Mutant("the median weighs clients as the mean does", "methods/aggregation.py",
           'return most if self.gather == "median"', 'return 0 if self.gather == "median"', GATHERING),
    Mutant("a replaced client counted like a removed one", "rounds/privacy.py", "(2 / z) ** 2", "(1 / z) ** 2", PRIVACY),
    Mutant("the same, where cohorts are sampled", "rounds/privacy.py",
           "library.GaussianDpEvent(z / 2)", "library.GaussianDpEvent(z)", PRIVACY),
    Mutant("only one step of DKD is accounted for", "rounds/privacy.py",
           "in method.plan(round)]", "in method.plan(round) if exchange.step == 1]", PRIVACY),
    Mutant("late uploads count", "rounds/exchange.py",
           "for client, why in events.items() if why}", "for client, why in events.items() if why == 'drop'}", FAULTS),
    Mutant("a client that dropped out computes all the same", "rounds/exchange.py",
           '_only(order, one, "late")', '_only(order, one, "drop")', FAULTS),
    Mutant("too few clients are taken in all the same", "rounds/exchange.py",
           "len(turn.cohort) < self.tolerance.min_clients", "len(turn.cohort) < 1", FAULTS),
    Mutant("a round with numbers that are not finite is not repeated", "rounds/loop.py", "[turn] if good else", "[turn] if True else", FAULTS),
    Mutant("a client whose numbers went bad keeps them", "rounds/exchange.py", "if client not in bad}", "}", FAULTS),
    Mutant("restored memos are added to the present ones", "engines/local.py", "if owner[0] != run}", "}", FAULTS),
    Mutant("workers that have nothing to do miss changed memos", "engines/pool/workers.py",
           "self._send(range(len(self.workers)), info)", "self._send(free, info)", POOL),
    Mutant("workers remember what was undone", "engines/pool/engine.py",
           "self._changed |= {owner for", "_ = {owner for", FAULTS),
    Mutant("a checkpoint without the clients' memos", "runs/checkpoint.py",
           "for client, memo in snapshot.memos.items()}", "for client, memo in ()}", ("tests/runs/test_resume.py",)),
    Mutant("a node forgets its earlier tensors at once", "flower/node.py",
           "for name in (expected, request.before) if name in held}", "for name in ()}", FLOWER),
    Mutant("a node forgets the tensors of the round's beginning", "flower/node.py",
           "(expected, request.before)", "(expected,)", FLOWER),
    Mutant("a round played again is taken for one that goes on", "flower/engine.py",
           "self._round, self._memo = 0, self._before[0]", "pass", FLOWER),
    Mutant("a node takes what it finds for what it should hold", "flower/node.py",
           "if expected not in (FIRST, NOTHING, *held):",
           "if expected not in held:\n        expected = FIRST\n    if False:", FLOWER),
    Mutant("anybody gets to a SuperLink's controls", "flower/deployment/gateway.py",
           "if not trusted and not path.startswith((FLEET, RUNTIME, HEALTH)):", "if False:", DOOR),
    Mutant("a stranger's key opens the fleet's paths", "flower/deployment/gateway.py",
           "and self._members.name(headers) is None", "and False", DOOR),
    Mutant("requests of unknown length have no end", "flower/deployment/gateway.py", "if received <= most", "if True", DOOR),
    Mutant("uploads over the wire are not looked at", "flower/engine.py",
           "check(unpack(content, self.most), pattern, finite=training)", "unpack(content, self.most)", FLOWER),
    Mutant("a client that has not begun holds nothing", "flower/engine.py",
           "expects=self.held.get(client, FIRST),", "expects=self.held.get(client, FIRST) or NOTHING,", FLOWER),
    Mutant("uploads go out without their masks", "flower/client_masking.py",
           "words = words + mask(", "words = words + 0 * mask(", MASKS),
    Mutant("one key for all exchanges of a round", "flower/client_masking.py",
           "{name: shares.new_key().hex() for name in names},", "dict.fromkeys(names, shares.new_key().hex()),", MASKS),
    Mutant("a mask is used a second time", "flower/client_masking.py", " or name in secrets.masked:", ":", MASKS),
    Mutant("secrets are revealed for any set of survivors", "flower/client_masking.py", "if before != wanted:", "if False:", MASKS),
    Mutant("an upload is in sums for several sets of survivors", "flower/opened_sums.py",
           'if np.any(near["survivors"] != np.void(who)):', "if False:", SECURE),
    Mutant("a node that is started again forgets the sums it opened", "flower/opened_sums.py",
           "put(folder /", "(lambda *_: None)(folder /", SECURE),
    Mutant("keys that no hospital has signed are taken", "flower/client_masking.py",
           "if node.peers is not None:", "if False:", MASKS),
    Mutant("noise on nodes follows from the seed", "simulation.py",
           "if self.engine.remote:  # its clients are sent the seed", "if False:", FLOWER),
    Mutant("secrets are revealed for too few survivors", "flower/client_masking.py",
           "if len(wanted) < secrets.threshold:", "if False:", MASKS),
    Mutant("seeds of silent clients and keys of survivors are revealed", "flower/client_masking.py",
           'held["seeds" if int(member) in wanted else "keys"]', 'held["keys" if int(member) in wanted else "seeds"]', MASKS),
    Mutant("a node that insists on masks forgets to", "flower/node.py",
           'if config.secure and not evaluating', 'if False and not evaluating', SECURE),
    Mutant("masked uploads weigh the same", "flower/masking.py",
           "examples if rule is Collect.MEAN_BY_EXAMPLES else clients", "clients", SECURE),
    Mutant("masks shared with the silent stay in the sum", "flower/opening.py",
           "yield -pairwise(", "yield 0 * pairwise(", SECURE),
    Mutant("shares are not held to what was announced", "flower/opening.py",
           "if computed.hex() != known:", "if False:", SECURE),
    Mutant("macro-F1 counts classes that do not occur", "rounds/metrics/outcomes.py",
           "return f1(sums).sum(-1) / (_occurring(sums) > 0).sum(-1)", "return f1(sums).mean(-1)",
           ("tests/rounds/test_metrics.py",)),
    Mutant("examples in one bin count as well ordered", "rounds/metrics/ranking.py",
           "negative.cumsum(-1) - negative / 2", "negative.cumsum(-1)", ("tests/rounds/test_metrics.py",)),
    Mutant("padding counts as a negative example", "rounds/metrics/ranking.py",
           "counts - true", "1 - true", ("tests/rounds/test_metrics.py",)),
    Mutant("a bad loss that no row shows is not noticed", "rounds/loop.py",
           "state_is_finite and turn.loss_is_finite and", "state_is_finite and", ("tests/rounds/test_metrics.py",)),
    Mutant("the highest loss is the best", "rounds/metrics/metric.py",
           "return value if self.higher_is_better else -value", "return value", ("tests/rounds/test_metrics.py",)),
    Mutant("a confusion matrix lies on its side", "rounds/evaluation.py",
           "(true * present[:, None]).T @ taken", "(taken * present[:, None]).T @ true", ("tests/reports/test_page.py",)),
    Mutant("a name in a record may end the script it stands in", "reports/html/page.py",
           """.replace("<", "\\\\u003c")""", "", ("tests/reports/test_page.py",)),
    Mutant("damaged rows before a checkpoint are not noticed", "runs/continuation.py",
           "t <= checked.rounds or not checked.sealed", "t", ("tests/runs/test_damage.py",)),
    Mutant("a seal of rows does not depend on the rows before", "runs/seal.py",
           "self._sum.update(line)", "self._sum = hashlib.sha256(line)", ("tests/runs/test_damage.py",)),
    Mutant("a forecast counts every exchange as one of the first phase", "runs/forecast.py",
           "costs = counts[id(phase)], short", "costs = counts[id(method.phases[0])], short", ("tests/runs/test_forecast.py",)),
    Mutant("other names of a tied tensor are forgotten", "models/tensor_kinds.py",
           "if id(tensor) in names}", "if names.get(id(tensor)) == key}", KINDS),
    Mutant("a second place of a tied tensor is left on the meta device", "models/functional.py",
           "tensors = {slot: given[name] for slot, name in self.tensors.slots.items()}", "tensors = given", OWN_NETWORKS),
    Mutant("frozen parameters are trained", "models/tensor_kinds.py",
           "for tensor in net.parameters() if tensor.requires_grad}", "for tensor in net.parameters()}", KINDS),
    Mutant("non-persistent buffers are sent", "models/tensor_kinds.py",
           "frozenset(buffers),", 'frozenset({names[id(tensor)] for tensor in net.buffers()}),', KINDS),
    Mutant("weights of a given network are thrown away", "models/functional.py",
           "name: tensor.detach().to(\"cpu\", copy=True)", "name: torch.zeros_like(tensor)", KINDS),
    Mutant("a network is built without the seed", "models/functional.py",
           "    with seeded_generators(key):\n        net = build()", "    net = build()", KINDS),
    Mutant("NumPy's generator is not seeded", "models/seeded_build.py", "np.random.seed(seed % 2**32)", "pass", KINDS),
    Mutant("Python's generator is not seeded", "models/seeded_build.py", "random.seed(seed)\n            yield", "yield", KINDS),
    Mutant("dropout as a function draws from a generator", "models/keyed_draws.py", '"dropout",\n        "alpha_dropout",\n        "dropout1d"',
           '"alpha_dropout",\n        "dropout1d"', OWN_NETWORKS),
    Mutant("dropout between recurrent layers draws from a generator", "models/keyed_layers.py",
           '**dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),', "", OWN_NETWORKS),
    Mutant("dropout in fused attention draws from a generator", "models/keyed_layers.py",
           '"scaled_dot_product_attention": _attention,', "", OWN_NETWORKS),
    Mutant("every draw of a call is the first", "models/keyed_numbers.py",
           "FREE + self.count, self.count + 1", "FREE + self.count, self.count", KINDS),
    Mutant("a dropout layer draws one mask for all its calls", "models/keyed_numbers.py", "self._calls[layer] += 1", "pass", KINDS),
    Mutant("a network that couples examples is padded", "models/proof.py",
           "couples=couples, head", "couples=model.couples, head", OWN_NETWORKS),
    Mutant("whether examples are mixed is tried with like examples only", "models/coupling.py",
           "for by in (FAR, -FAR)", "for by in (1, 1)", PROOF),
    Mutant("examples that are mixed in the gradient alone are overlooked", "models/coupling.py",
           "for part in (few, more)]", "for part in (few, few)]", PROOF),
    Mutant("a draw for the whole batch is overlooked", "models/coupling.py",
           "not shape or shape[0] % len(first)", "shape is None", PROOF),
    Mutant("what the functional form computes is not compared", "models/proof.py",
           "if not is_close(expected.logits, actual.logits):", "if False:", PROOF),
    Mutant("generators that move are not seen", "models/proof.py",
           "if before != generator_states", "if False and before != generator_states", KINDS),
    Mutant("seeds with other frozen weights go together", "models/functional.py",
           "return ours.keys() == theirs.keys() and all(", "return True or all(", KINDS),
    Mutant("names kept at home are sent", "method/method.py",
           "kinds.union(*(_matching(pattern, model) for pattern in self.private_patterns))", "kinds", KINDS),
    Mutant("personal models are validated on the data of all clients", "data/federation.py",
           '"validation": (self.validation, self.own_validation)', '"validation": (self.validation, None)', KINDS),
    Mutant("a file of initial weights may be another", "models/weight_files.py",
           "if sha256 is not None and", "if False and", KINDS),
    Mutant("a method may train tensors that are not evaluated", "testing/laws.py",
           '"reports what it trains": reports_what_it_trains,', '"reports what it trains": mutates_nothing,',
           ("tests/testing/test_testing.py",)),
    Mutant("a parameter used from a list keeps its first numbers", "models/strays.py",
           "self._refuse(leaf)", "pass", KINDS),
    Mutant("gradients of a network are not compared", "models/proof.py",
           "for name in sorted(actual):", "for name in ():", PROOF),
    Mutant("threads share the draws of a call", "models/skeleton.py",
           "class CallState(threading.local):", "class CallState:", KINDS),
    Mutant("a recurrent layer reads its input forwards both ways", "models/recurrent.py",
           "x.flip(0) if way else x", "x", ("tests/models/test_recurrent.py",)),
    Mutant("centralised training on one client's examples", "data/federation.py",
           "return IndexLists.of(self.train).values", "return self.train[0]", BASELINES),
    Mutant("local_only forgets a client's model", "methods/local_only.py", 'private="model"', 'private="none"', BASELINES),
    Mutant("sharpness-aware steps down the slope", "methods/sharpness.py",
           "rho * d / length", "-rho * d / length", SHARPNESS),
    Mutant("FedCM takes the sum of the steps for their mean", "methods/fedcm.py",
           'length = collected["reach"]["a"] * rates["lr"]', 'length = rates["lr"]', SHARPNESS),
    Mutant("MoFedSAM without sharpness", "methods/fedsam.py",
           "replace(variant, take=sharpness_aware(rho))", "variant", SHARPNESS),
    Mutant("FedExP steps back where clients agree", "methods/fedexp.py", "eta.clamp(min=1)", "eta", SHARPNESS),
    Mutant("FedACG does not look ahead", "methods/fedacg.py",
           'add(state["params"], state["momentum"], momentum)', 'state["params"]', SHARPNESS),
    Mutant("FedGamma without sharpness", "methods/fedgamma.py",
           "replace(variant, take=sharpness_aware(rho))", "variant", SHARPNESS),
    Mutant("FedSpeed without its correction", "methods/fedspeed.py", "lambda h_k, g, w, w_t: g - h_k + alpha", "lambda h_k, g, w, w_t: g + alpha", SHARPNESS),
    Mutant("FedSMOO's clients forget the shared perturbation", "methods/fedsmoo.py", "mu + e - s", "mu + e", SHARPNESS),
    Mutant("FedLESAM forgets what a client received", "methods/fedlesam.py",
           '({}, {"received": sent["params"]})', '({}, {"received": memo["received"]})', SHARPNESS),
]  # fmt: skip


def is_caught(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests", "tools", "examples"):
            shutil.copytree(
                ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
            )
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src" / "feddkd" / mutant.file
        target.write_text(
            target.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8"
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *mutant.tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600
        )
        if done.returncode not in (0, 1):  # anything else is not a failing test
            sys.exit(
                f"{mutant.what}: pytest ended with status {done.returncode}\n{done.stdout}{done.stderr}"
            )
        return done.returncode == 1


def main() -> None:
    """Try all mutants, or those with one of the given words in their file or description."""
    words = sys.argv[1:] or [""]
    chosen = [mutant for mutant in MUTANTS if any(w in mutant.file + mutant.what for w in words)]
    with ThreadPoolExecutor(2) as pool:
        caught = pool.map(is_caught, chosen)
        survivors = []
        for mutant, died in zip(chosen, caught, strict=True):
            print(f"{'caught' if died else 'SURVIVED'}: {mutant.what} ({mutant.file})", flush=True)
            survivors += [] if died else [mutant.what]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants caught")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
