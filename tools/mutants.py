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
DEFENCES = ("tests/methods/test_defences.py",)
COMPRESSION = ("tests/methods/test_compression.py",)
SELECTION = ("tests/rounds/test_selection.py",)
ATTACKS = ("tests/rounds/test_attacks.py",)
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
PERSONAL = ("tests/methods/test_methods_personal.py",)
PROOF = ("tests/models/test_proof.py",)
OWN_TESTS = ("tests/data/test_own_tests.py",)
TABLES = ("tests/data/test_tables.py",)
VERSIONS = ("tests/data/test_versions.py",)
DOWNLOADS = ("tests/data/test_downloads.py",)
JOBS = ("tests/papers/test_jobs.py",)
TEACHERS = ("tests/methods/test_dkd_teachers.py",)
CONTROLS = ("tests/runs/test_controls.py",)


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
    Mutant("Krum adds up all distances", "methods/defences.py",
           "nearest = max(len(updates) - faulty - 2, 1)",
           "nearest = len(updates)", DEFENCES),
    Mutant("Multi-Krum keeps the worst", "methods/defences.py",
           "scores(updates, faulty).argsort(stable=True)",
           "scores(updates, faulty).argsort(stable=True, descending=True)", DEFENCES),
    Mutant("centred clipping forgets the last update", "methods/defences.py",
           "away = updates - last",
           "away = updates - 0 * last", DEFENCES),
    Mutant("int8 rounds to the nearest code", "methods/quantise.py",
           "+ drawn.to(tensor.dtype)",
           "+ 0.5", COMPRESSION),
    Mutant("bfloat16 cuts off what does not fit", "methods/quantise.py",
           "+ (drawn * (1 << 16)).to(torch.int32)",
           "+ 0", COMPRESSION),
    Mutant("what was not sent is forgotten", "method/compression.py",
           "kept[unsent[group]] = add(whole, codec.decode(parts, whole), -1.0)",
           "kept[unsent[group]] = zeros(whole)", COMPRESSION),
    Mutant("compressed uploads counted as whole ones", "rounds/costs.py",
           "if reply.uploaded is not None:",
           "if False:", COMPRESSION),
    Mutant("a node's places are taken as they come", "methods/topk.py",
           'return "" if rising and inside',
           'return "" if True', COMPRESSION),
    Mutant("large clients drawn as often as small ones", "rounds/selection/rule.py",
           "random.exponential(size=len(weights)) / weights",
           "random.exponential(size=len(weights)) / (0 * weights + 1)", SELECTION),
    Mutant("power of choice takes the smallest losses", "rounds/selection/by_loss.py",
           "np.lexsort((drawn, np.negative(losses)))",
           "np.lexsort((drawn, losses))", SELECTION),
    Mutant("Oort does not note when a client took part", "rounds/selection/by_loss.py",
           "utility[client], last[client] = value, known.round",
           "utility[client], last[client] = value, 1", SELECTION),
    Mutant("asking costs nothing", "rounds/selection/cohorts.py",
           "communications=costs.communications + 1",
           "communications=costs.communications", SELECTION),
    Mutant("honest clients lie, too", "rounds/attacks/rule.py",
           "torch.where(lying, lie, honest)",
           "lie + 0 * lying", ATTACKS),
    Mutant("a liar passes the bound", "rounds/attacks/rule.py",
           "if phase.clip is not None:\n            bad",
           "if False:\n            bad", ATTACKS),
    Mutant("clients that share examples with a malicious one read its labels", "rounds/attacks/of_data.py",
           "values[begin:end] = np.arange(start, start + end - begin)",
           "values[np.isin(values, values[begin:end])] = start", ATTACKS),
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
    Mutant("requests of unknown length have no end", "flower/deployment/gateway.py", "if received <= most", "if True", DOOR),
    Mutant("uploads over the wire are not looked at", "flower/engine.py",
           "check(upload, pattern, finite=training)", "upload", FLOWER),
    Mutant("a client that has not begun holds nothing", "flower/engine.py",
           "expects=self.held.get(client, FIRST),", "expects=self.held.get(client, FIRST) or NOTHING,", FLOWER),
    Mutant("uploads go out without their masks", "flower/client_masking.py",
           "words = words + mask(", "words = words + 0 * mask(", MASKS),
    Mutant("one key for all exchanges of a round", "flower/client_masking.py",
           "{name: shares.new_key().hex() for name in names},", "dict.fromkeys(names, shares.new_key().hex()),", MASKS),
    Mutant("a mask is used a second time", "flower/client_masking.py", " or name in secrets.masked:", ":", MASKS),
    Mutant("secrets are revealed for any set of survivors", "flower/client_masking.py", "if before != wanted:", "if False:", MASKS),
    Mutant("secrets are revealed for too few survivors", "flower/client_masking.py",
           "if len(wanted) < secrets.threshold:", "if False:", MASKS),
    Mutant("seeds of silent clients and keys of survivors are revealed", "flower/client_masking.py",
           'held["seeds" if int(member) in wanted else "keys"]', 'held["keys" if int(member) in wanted else "seeds"]', MASKS),
    Mutant("a node that insists on masks forgets to", "flower/node.py",
           'if config.secure and not evaluating', 'if False and not evaluating', SECURE),
    Mutant("masked uploads weigh the same", "flower/masking.py",
           "examples if rule is Collect.MEAN_BY_EXAMPLES else clients", "clients", SECURE),
    Mutant("masks shared with the silent stay in the sum", "flower/secure.py",
           "yield -pairwise(", "yield 0 * pairwise(", SECURE),
    Mutant("shares are not held to what was announced", "flower/secure.py",
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
    Mutant("ignored positions count", "tasks/positions.py",
           "return target != IGNORED", "return target == target", ("tests/tasks/test_tasks.py",)),
    Mutant("positions of an example share its weight", "tasks/task.py",
           "return weights / weights.sum().clamp(min=LEAST)",
           "return weights / counted.flatten(1).sum(1).clamp(min=1).reshape(-1, *(1,) * (counted.dim() - 1))",
           ("tests/tasks/test_tasks.py",)),
    Mutant("clients weigh by examples where they should by tokens", "data/federation.py",
           "len(indices) if self.units is None else int(self.units[indices].sum())", "len(indices)",
           ("tests/tasks/test_tasks.py",)),
    Mutant("the loss of the test set is a mean over examples", "rounds/evaluation.py",
           "count = (shares > 0).double().sum()", "count = (batch.share > 0).double().sum() + 0 * shares.sum()",
           ("tests/tasks/test_tasks.py", "tests/rounds/test_metrics.py")),
    Mutant("a divergence of labels is their mean", "tasks/formulas.py",
           "return (by_example(each).sum(-1) * share).sum()", "return (by_example(each).mean(-1) * share).sum()",
           ("tests/tasks/test_tasks.py",)),
    Mutant("a high RMSE is good", "rounds/metrics/regression.py",
           """lambda sums: mean(sums).sqrt(),
        higher_is_better=False""", """lambda sums: mean(sums).sqrt(),
        higher_is_better=True""", ("tests/rounds/test_targets.py",)),
    Mutant("a high perplexity is good", "rounds/metrics/language.py",
           """lambda sums: mean(sums).exp(),
        higher_is_better=False""", """lambda sums: mean(sums).exp(),
        higher_is_better=True""", ("tests/rounds/test_targets.py",)),
    Mutant("a target is reached in the wrong direction", "rounds/metrics/target.py",
           ">= self.metric.rank(self.value)", "<= self.metric.rank(self.value)", ("tests/rounds/test_targets.py",)),
    Mutant("the best clients are the worst tenth", "runs/client_spread.py",
           "sorted(found, key=metric.rank)", "sorted(found, key=metric.rank, reverse=True)",
           ("tests/runs/test_client_spread.py",)),
    Mutant("the last round is not evaluated", "rounds/judging.py",
           "round in (1, last) or", "round == 1 or", ("tests/rounds/test_judging.py",)),
    Mutant("a node runs the task that a message names", "flower/sent_experiment.py",
           'taken["task"] = _own_file("task", str(taken["task"]), network)', "pass",
           ("tests/tasks/test_tasks_on_flower.py",)),
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
           "kinds | matching(self.private_patterns, model)", "kinds", KINDS),
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
    Mutant("a client's own tests have everybody's labels", "data/partitions/own_tests.py",
           "return np.asarray(domains * classes + part.y.numpy())",
           "return np.asarray(domains * classes)", OWN_TESTS),
    Mutant("wrong labels in tests, too", "data/partitions/changes.py",
           "if change.labels is not None and part == \"training\":",
           "if change.labels is not None:", OWN_TESTS),
    Mutant("the mask counts one position of padding", "data/sequences.py",
           "torch.arange(longest) < lengths[:, None]",
           "torch.arange(longest) <= lengths[:, None]", TABLES),
    Mutant("the target of a character is the character", "data/text.py",
           "x, y = tokens[:, :-1].clone(), tokens[:, 1:]",
           "x, y = tokens[:, :-1].clone(), tokens[:, :-1]", TABLES),
    Mutant("columns scaled by the test rows, too", "data/tables.py",
           "mean, deviation = rows[trained].mean(axis=0), rows[trained].std(axis=0)",
           "mean, deviation = rows.mean(axis=0), rows.std(axis=0)", TABLES),
    Mutant("all versions of an example are one", "data/versions.py",
           "(\"version\", seed, n)",
           "(\"version\", seed, 0)", VERSIONS),
    Mutant("a download is kept whatever its checksum", "data/sources/downloads.py",
           "expect(digest == md5, f\"its md5",
           "expect(bool(digest), f\"its md5", DOWNLOADS),
    Mutant('personalised clients are judged by the shared model', 'method/client.py',
           'return {**memo.get("private", {}), **memo.get("personal", {})}', 'return {**memo.get("private", {})}', PERSONAL),
    Mutant('a held tensor is moved', 'methods/local.py',
           'torch.where(holds[name], before[group][name], new) if name in holds else new', 'new', PERSONAL),
    Mutant('fine-tuning leaks into the next round', 'methods/fine_tuning.py',
           '{**memo, "personal": after["model"]}', '{**after, "personal": after["model"]}', PERSONAL),
    Mutant('LG-FedAvg keeps the heads private', 'methods/lg_fedavg.py',
           'names, "body")', 'names, "head")', PERSONAL),
    Mutant('FedRep trains the body first', 'methods/fedrep.py',
           '~of_head if name in head else of_head', 'of_head if name in head else ~of_head', PERSONAL),
    Mutant('FedBABU trains the head in its rounds', 'methods/fedbabu.py',
           'Variant(holds=holding("body", names))', 'Variant()', PERSONAL),
    Mutant('Ditto without its pull', 'methods/ditto.py',
           'g + lam * (v - w)', 'g', PERSONAL),
    Mutant("APFL's mixture does not adapt", 'methods/apfl.py',
           'mixture["alpha"] - lr * sum(parts.values())', 'mixture["alpha"]', PERSONAL),
    Mutant("pFedMe's personal model is not near the centre", 'methods/pfedme.py',
           'gradient + lam * (theta - w)', 'gradient', PERSONAL),
    Mutant('Per-FedAvg steps on the wrong mini-batch', 'methods/per_fedavg.py',
           '% period != period - 1', '% period != 0', PERSONAL),
    Mutant("Fed-RoD's own head learns alone", 'methods/fedrod.py',
           'output.logits + model.apply_head', 'model.apply_head', PERSONAL),
    Mutant("FedProto's means are divided by the clients", 'methods/fedproto.py',
           'torch.where(known, count, 1)', 'torch.ones_like(count)', PERSONAL),
    Mutant('FedAMP mixes unlike models most', 'methods/fedamp.py',
           'torch.exp(-torch', 'torch.exp(torch', PERSONAL),
    Mutant("FedLC's margins are those of frequent classes", 'methods/fedlc.py',
           'counts**-0.25', 'counts**0.25', PERSONAL),
    Mutant('FedRS restricts the classes that a client has', 'methods/fedrs.py',
           '["count"] == 0', '["count"] > 0', PERSONAL),
    Mutant('FedALA takes the shared head alone', 'methods/fedala.py',
           'last + (shared - last) * weight', 'shared + 0 * last * weight', PERSONAL),
    Mutant('FedFish without the Fisher information', 'methods/fedfish.py',
           '* (fisher + epsilon)', '* (0 * fisher + epsilon)', PERSONAL),
    Mutant('FedDecorr without the variances', 'methods/feddecorr.py',
           'centred / ((share * centred**2).sum(0) + EPS).sqrt()', 'centred', PERSONAL),
    Mutant("all clients draw the same six classes", "data/partitions/label_skew.py",
           "replace=False) for _ in range(clients)]\n    return [\n        np.concatenate([random.choice(pools[r], size",
           "replace=False)] * clients\n    return [\n        np.concatenate([random.choice(pools[r], size", JOBS),
    Mutant("FedBN's domains divided by another seed", "data/sources/digit_domains.py", "random_state=0", "random_state=1", JOBS),
    Mutant("FEMNIST's images normalised before they are padded", "data/sources/published.py",
           '"pad(pixels=2) | normalise(mean=0.1307, std=0.3081)"', '"normalise(mean=0.1307, std=0.3081) | pad(pixels=2)"', JOBS),
    Mutant("an activation between FedGen's full layers", "models/networks/emnist_cnn.py",
           "nn.Linear(784, 32), nn", "nn.Linear(784, 32), nn.ReLU(), nn", JOBS),
    Mutant("VGG-9 drops half of its features", "models/networks/vgg9.py",
           "nn.Flatten(),\n        nn.Dropout(0.1)", "nn.Flatten(),\n        nn.Dropout(0.5)", JOBS),
    Mutant("the mean over domains pools their examples", "rounds/evaluation.py",
           "if protocol is not Protocol.CLIENT_MEAN:\n        return metric", "if True:\n        return metric", JOBS),
    Mutant("a control's labels are the teacher's output", "methods/teachers.py", 'if teacher == "labels":', "if False:", TEACHERS),
    Mutant("a shuffled client is its own teacher", "methods/teachers.py", ".roll(-1)", ".roll(0)", TEACHERS),
    Mutant("a control has the rounds of the experiment", "runs/controls.py",
           "rounds = round(experiment.rounds * getattr(whole, cost) / getattr(part, cost))", "rounds = experiment.rounds", CONTROLS),
    Mutant("a control's rate falls too far", "runs/controls.py", "decay**share", "decay", CONTROLS),
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
