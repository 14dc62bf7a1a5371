"""Models of Hugging Face and LoRA adapters of peft, from small random configurations:

`make networks`.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddkd import functional, simulate
from feddkd import lora as feddkd_lora
from feddkd.models.adapters import adapters
from own_networks import WORDS, Case
from test_own_networks import METHODS, WAYS, check, data

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.networks,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=8,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    """Its output layer is tied to its embedding."""
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_embd=8,
        n_layer=2,
        n_head=2,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_channels=2,
        num_labels=3,
    )
    return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]


def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=WORDS,
        dim=8,
        n_layers=1,
        n_heads=2,
        hidden_dim=12,
        max_position_embeddings=8,
        num_labels=3,
    )
    return transformers.DistilBertForSequenceClassification(config)  # type: ignore[no-any-return]


def lora() -> nn.Module:
    config = peft.LoraConfig(
        r=2,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
        lora_dropout=0.1,
        task_type="SEQ_CLS",
    )
    return peft.get_peft_model(bert(), config)  # type: ignore[no-any-return]


def logits(found: Any) -> Tensor:
    return found.logits  # type: ignore[no-any-return]


def last_logits(found: Any) -> Tensor:
    return found.logits[:, -1]  # type: ignore[no-any-return]


CASES = {
    "bert": Case(bert, "tokens", logits),
    "gpt-2": Case(gpt2, "tokens", last_logits, last_logits),
    "vit": Case(vit, "image", logits),
    "distilbert": Case(distilbert, "tokens", logits),
    "lora": Case(lora, "tokens", logits),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_hugging_face_model_computes_what_it_would_with_torch_optim(
    name: str, way: str, method: str
) -> None:
    check(CASES[name], way, method)


def test_lora_uploads_what_peft_calls_trainable_and_nothing_else() -> None:
    torch.manual_seed(0)
    net, pairs = lora(), data(CASES["lora"])
    trainable = sum(parameter.numel() for parameter in net.parameters() if parameter.requires_grad)
    result = simulate(model=net, clients=pairs, test=pairs[0], method="fedavg(epochs=1)")
    assert result.history[0]["bytes_up"] == 4 * trainable * len(pairs)
    before = net.state_dict()
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    after = result.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    assert not torch.equal(
        after["base_model.model.classifier.modules_to_save.default.weight"],
        before["base_model.model.classifier.modules_to_save.default.weight"],
    )
    net.load_state_dict(after)


def test_a_pretrained_model_starts_from_its_weights() -> None:
    torch.manual_seed(0)
    net = bert()
    params, _ = functional(net).start()
    embedding = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(params[embedding], net.state_dict()[embedding])
    assert params[embedding].std() < 0.05  # torch's own layers would draw 1


def test_peft_reads_the_adapters_of_lora_and_computes_the_same() -> None:
    torch.manual_seed(0)
    base, (x, _) = bert().eval(), data(CASES["lora"])[0]
    net = feddkd_lora(base, rank=2, alpha=6, targets="query, value", trained="")
    for adapted in adapters(net).values():
        nn.init.normal_(adapted.get_parameter("lora_B.default.weight"))
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["query", "value"])
    theirs = peft.get_peft_model(copy.deepcopy(base), config).eval()
    assert {f"base_model.model.{name}" for name in net.state_dict()} == set(theirs.state_dict())
    theirs.load_state_dict({f"base_model.model.{n}": t for n, t in net.state_dict().items()})
    with torch.no_grad():
        assert (net(x).logits - theirs(x).logits).abs().max() < 1e-6
