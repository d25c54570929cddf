"""Models of Hugging Face transformers on our experts implementation, against its own: logits, gradients, habits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fusible_ops as ops
from fusible_ops import functional
from fusible_ops.integrations import huggingface
from fusible_ops.integrations.huggingface import NAME
from tests.compare import assert_as_accurate, assert_bitwise_equal, relative_error
from tests.models import as_if_on
from tests.places import Place

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests import hf_models  # noqa: E402
from tests.hf_models import VOCABULARY, choices_of, experts_of, load_peft, small, step, with_lora  # noqa: E402

MODELS = list(hf_models.CONFIGS)
SUMS = 2e-5
"""How far results in FP32 may be apart, relative to their norm, where sums are made in another order: some roundings of
6e-8 over the layers, times what cancels in gradients of routers."""


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Plans are kept by device, and these tests take one for another."""
    functional._local.__dict__.clear()
    huggingface.install()
    yield
    huggingface.uninstall()


def tokens(device: str = "cpu", rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)


def assert_near(got: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = SUMS) -> None:
    assert got.keys() == wanted.keys()
    for name, t in wanted.items():
        error = relative_error(got[name], t)
        assert error <= bound, f"{name}: relative error {error:.2e}, at most {bound:.0e} is allowed"


@pytest.mark.parametrize("theirs", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_agree_in_fp32(name: str, theirs: str) -> None:
    model = small(name)
    got, wanted = step(model, tokens(), NAME), step(model, tokens(), theirs)
    assert {f"d{name}" for name, _ in model.named_parameters()} <= got.keys()
    assert_near(got, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_as_accurate_in_bf16(place: Place, name: str) -> None:
    """Against FP32, as far as grouped_mm is; all three choose the same experts."""
    if place.fused:
        huggingface.install(on_unfused="error")
    model = small(name, torch.bfloat16, place.device)
    exact = copy.deepcopy(model).float()
    ids, results, chosen = tokens(place.device), [], []
    for each, implementation in ((model, NAME), (model, "grouped_mm"), (exact, "eager")):
        with choices_of(each) as choices:
            results.append({n: t.clone() for n, t in step(each, ids, implementation).items()})
        chosen.append(torch.stack(choices).sort(dim=-1).values)
    assert_bitwise_equal(chosen[0], chosen[2])
    assert_bitwise_equal(chosen[1], chosen[2])
    got, same, truth = results
    del truth["loss"]  # one number, whose error is a matter of luck
    for key, t in truth.items():
        assert_as_accurate(got[key], same[key], t, key)


# ----------------------------------------------------------------------------------------------------------------------
# One experts module, and what a router may give it


def experts_module(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    return experts_of(small(name, dtype, device, NAME))[0]


def ran(experts: Any, implementation: str, x: Tensor, index: Tensor, weights: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of a call."""
    experts.config._experts_implementation = implementation
    experts.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, index, weights)
    y.backward(dy)
    grads = {f"d{n}": p.grad.clone() for n, p in experts.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, "dweights": weights.grad, **grads}  # type: ignore[dict-item]


ROUTINGS = {
    "one_token": torch.tensor([[5, 2]]),
    "empty_experts": torch.tensor([[1, 6]] * 9 + [[6, 3]] * 24),
    "all_in_one": torch.full((40, 1), 7),
    "every_expert": torch.arange(8).repeat(20, 1),
}


@pytest.mark.parametrize("routing", list(ROUTINGS))
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_what_a_router_may_choose(place: Place, name: str, routing: str) -> None:
    dtype, device = torch.bfloat16, place.device
    experts, index = experts_module(name, dtype, device), ROUTINGS[routing].to(device)
    x, dy = (torch.randn(len(index), 64, dtype=dtype, device=device) for _ in range(2))
    weights = torch.rand(index.shape, device=device).to(dtype)
    got = ran(experts, NAME, x, index, weights, dy)
    same = ran(experts, "grouped_mm", x, index, weights, dy)
    truth = ran(experts.double(), "eager", x.double(), index, weights.double(), dy.double())
    assert got["y"].dtype == dtype and got["dweights"].dtype == dtype
    for key, t in truth.items():
        if t.numel() < 16:  # the error of so few numbers is a matter of luck: some roundings of 2^-9 each
            assert relative_error(got[key], t) < 2**-6, key
        else:
            assert_as_accurate(got[key], same[key], t, key)
    unused = sorted(set(range(8)) - set(index.flatten().tolist()))
    assert not got["ddown_proj"][unused].any() and not got["dgate_up_proj"][unused].any()


def test_no_tokens(place: Place) -> None:
    experts = experts_module("gpt_oss", torch.bfloat16, place.device)
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=place.device)
    index = torch.empty(0, 2, dtype=torch.int64, device=place.device)
    got = ran(experts, NAME, x, index, index.bfloat16(), x)
    assert got["y"].shape == got["dx"].shape == (0, 64) and not any(t.any() for t in got.values())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_of_other_ranks(place: Place, name: str) -> None:
    """As expert parallelism marks them: id `num_experts`, weight 0. They add nothing and get no gradient."""
    dtype, device = torch.bfloat16, place.device
    experts = experts_module(name, dtype, device)
    experts._is_expert_parallel = True
    index = torch.tensor([[0, 8], [8, 8], [8, 5], [5, 7], [8, 0]] * 4, device=device)
    there = index >= 8
    x, dy = (torch.randn(len(index), 64, dtype=dtype, device=device) for _ in range(2))
    weights = torch.rand(index.shape, device=device).to(dtype).masked_fill(there, 0.0)
    got = ran(experts, NAME, x, index, weights, dy)
    same = ran(experts, "grouped_mm", x, index, weights, dy)
    truth = ran(experts.double(), "batched_mm", x.double(), index, weights.double(), dy.double())
    for key, t in truth.items():
        assert_as_accurate(got[key], same[key], t, key)
    assert not got["y"][1].any() and not got["dx"][1].any() and not got["dweights"][there].any()


def test_dtypes_of_the_model() -> None:
    """Router weights in FP32 beside BF16, an input in FP32 beside BF16 weights, FP16 and FP64."""
    index = ROUTINGS["empty_experts"]
    for dtype, x_dtype, weights_dtype in (
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float16, torch.float16),
        (torch.float64, torch.float64, torch.float64),
    ):
        theirs = "eager" if dtype == torch.float64 else "grouped_mm"
        experts = experts_module("mixtral", dtype)
        x, dy = (torch.randn(len(index), 64, dtype=x_dtype) for _ in range(2))
        weights = torch.rand(index.shape, dtype=weights_dtype)
        got, same = (ran(experts, each, x, index, weights, dy) for each in (NAME, theirs))
        assert {k: t.dtype for k, t in got.items()} == {k: t.dtype for k, t in same.items()}
        assert_near(got, same, 4 * torch.finfo(dtype).eps)


def test_under_autocast_weights_are_cast(place: Place) -> None:
    experts, index = experts_module("mixtral", torch.float32, place.device), ROUTINGS["every_expert"].to(place.device)
    x, dy = (torch.randn(len(index), 64, device=place.device) for _ in range(2))
    weights = torch.rand(index.shape, device=place.device)
    with torch.autocast(place.device, torch.bfloat16):
        got, same = (ran(experts, each, x, index, weights, dy) for each in (NAME, "eager"))
    truth = ran(experts.double(), "eager", x.double(), index, weights.double(), dy.double())
    assert got["y"].dtype == torch.float32 and got["ddown_proj"].dtype == torch.float32
    for key, t in truth.items():
        assert_as_accurate(got[key], same[key].bfloat16().float(), t, key)


def test_in_fp8_blocks(place: Place) -> None:
    """A recipe holds for experts too: E4M3 has three bits, so results are within some per cent, and not the same."""
    experts, index = experts_module("mixtral", torch.bfloat16, place.device), ROUTINGS["every_expert"].to(place.device)
    x, dy = (torch.randn(len(index), 64, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    weights = torch.rand(index.shape, device=place.device)
    plain = ran(experts, NAME, x, index, weights, dy)
    with ops.autocast(recipe=ops.Float8BlockScaling()):
        got = ran(experts, NAME, x, index, weights, dy)
    for key, t in plain.items():
        assert 1e-3 < relative_error(got[key], t) < 0.1, key


# ----------------------------------------------------------------------------------------------------------------------
# Habits of training and of inference


@pytest.mark.parametrize("frozen", ["experts", "bias", "proj", "all_but_router"])
def test_frozen_parameters(place: Place, frozen: str) -> None:
    """Those get no gradient, the others the one that they had."""
    model, ids = small("gpt_oss", torch.bfloat16, place.device), tokens(place.device)
    wanted = step(model, ids, NAME)
    wanted = {name: t.clone() for name, t in wanted.items()}
    marks = {"experts": (".experts.",), "bias": ("_proj_bias",), "proj": ("_up_proj", "down_proj")}
    for name, p in model.named_parameters():
        if frozen == "all_but_router":
            p.requires_grad_("router" in name)
        elif frozen == "proj":
            p.requires_grad_(not name.endswith(marks[frozen]))
        else:
            p.requires_grad_(not any(mark in name for mark in marks[frozen]))
    got = step(model, ids, NAME)
    trained = {f"d{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert trained and got.keys() == {"logits", "loss", *trained}
    for name, t in got.items():
        assert_bitwise_equal(t, wanted[name], name)


def test_without_gradients_nothing_else_comes_out(place: Place) -> None:
    model, ids = small("gpt_oss", torch.bfloat16, place.device, NAME), tokens(place.device)
    wanted = model(input_ids=ids).logits
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_bitwise_equal(model(input_ids=ids).logits, wanted.detach())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(place: Place, reentrant: bool) -> None:
    model, ids = small("qwen3", torch.bfloat16, place.device).train(), tokens(place.device)
    wanted = {name: t.clone() for name, t in step(model, ids, NAME).items()}
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for _ in range(3):  # calls that are alike take a shorter way from the third on
        for name, t in step(model, ids, NAME).items():
            assert_bitwise_equal(t, wanted[name], name)


def test_training_steps(place: Place) -> None:
    """Weights that an optimizer changes are seen, and losses are those of the model's own implementation."""
    losses = []
    for implementation in (NAME, "eager"):
        model, ids = small("qwen3", torch.float32, place.device), tokens(place.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(4):
            losses[-1].append(float(step(model, ids, implementation)["loss"]))
            optimizer.step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0] - 0.5


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")
def test_their_trainer_trains_it(tmp_path: Path) -> None:
    """`Trainer`, told nothing of it: losses as with grouped_mm."""
    load_peft()  # as it has to be imported; the trainer does so
    losses = []
    rows = [{"input_ids": row, "labels": row} for row in tokens(rows=8)]
    for implementation in (NAME, "grouped_mm"):
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
            logging_steps=1, report_to=[], save_strategy="no", seed=3, disable_tqdm=True, learning_rate=1e-2,
        )  # fmt: skip
        trainer = transformers.Trainer(small("qwen3", implementation=implementation), arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3 and losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_save_and_load(tmp_path: Path) -> None:
    model = small("gpt_oss", implementation=NAME)
    keys = list(small("gpt_oss").state_dict())
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=NAME)
    assert loaded.config._experts_implementation == NAME
    assert_bitwise_equal(loaded(input_ids=tokens()).logits, model.eval()(input_ids=tokens()).logits)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._experts_implementation != NAME
    assert relative_error(plain(input_ids=tokens()).logits, model(input_ids=tokens()).logits) < SUMS


def test_copies_have_weights_of_their_own() -> None:
    model = small("mixtral", implementation=NAME)
    other = copy.deepcopy(model)
    with torch.no_grad():
        experts_of(other)[0].down_proj.zero_()
    wanted, changed = model(input_ids=tokens()).logits, other(input_ids=tokens()).logits
    assert relative_error(changed, wanted) > 1e-3
    other.load_state_dict(model.state_dict())
    assert_bitwise_equal(other(input_ids=tokens()).logits, wanted)


def test_generate() -> None:
    """Greedy decoding, a row a step: the same tokens."""
    model = small("mixtral").eval()
    written = []
    for implementation in (NAME, "eager"):
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            written.append(model.generate(tokens(), max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert_bitwise_equal(written[0], written[1])


def test_each_layer_keeps_its_own_calls() -> None:
    """Layers of one shape do not make each other forget: from the third call on each takes its shortcut."""
    with as_if_on("sm_90a"):
        model = small("qwen3", torch.bfloat16)
        for _ in range(4):
            step(model, tokens(), NAME)
        fusers = list(functional._local.fusers.values())
        assert len(fusers) == 2 and all(len(fuser._shortcuts) == 1 for fuser in fusers)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo instantiates Functions
@pytest.mark.parametrize(("name", "fused"), [("mixtral", False), ("gpt_oss", True)])
def test_compiled_without_a_break(name: str, fused: bool) -> None:
    torch._dynamo.reset()
    with Place("cpu", fused).context():
        model = small(name, torch.bfloat16)
        wanted = {key: t.clone() for key, t in step(model, tokens(), NAME).items()}
        model.compile(fullgraph=True, backend="aot_eager")
        for key, t in step(model, tokens(), NAME).items():
            assert_bitwise_equal(t, wanted[key], key)
    torch._dynamo.reset()


def test_fake_tensors() -> None:
    """What a model computes is found out on numbers, though its own tensors have none."""
    with FakeTensorMode():
        model = transformers.AutoModelForCausalLM.from_config(
            hf_models.small_config("mixtral"), experts_implementation=NAME
        )
        y = model(input_ids=torch.zeros(2, 5, dtype=torch.int64)).logits
    assert y.shape == (2, 5, VOCABULARY) and isinstance(y, FakeTensor)


def test_of_quantised_experts_it_is_said_that_they_are_not_run() -> None:
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model = small("mixtral", torch.bfloat16, implementation=NAME)
    replace_with_fp8_linear(model, ["lm_head"], transformers.FineGrainedFP8Config())
    told = huggingface.explain(model, "sm_90a")
    assert "FP8Experts holds weights in float8_e4m3fn" in told and "dequantize=True" in told and "fused" not in told
    with pytest.raises(KeyError, match=NAME):
        experts_of(model)[0](torch.empty(1, 64), torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2))


# ----------------------------------------------------------------------------------------------------------------------
# Adapters


@pytest.mark.parametrize("name", MODELS)
def test_lora_on_experts(name: str) -> None:
    """Only adapters get gradients, and those that they get with the model's own implementation; biases stay frozen."""
    model = with_lora(small(name))
    results = []
    for implementation in (NAME, "eager"):
        model.base_model.model.set_experts_implementation(implementation)
        model.zero_grad()
        y = model(input_ids=tokens(), labels=tokens())
        y.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert len(grads) == 2 * 2 * 2 and all("lora_" in n for n in grads)  # layers, weights, A and B
        results.append({"logits": y.logits.detach(), **grads})
    assert_near(*results)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_lora_fused_and_merged(place: Place, name: str) -> None:
    """An adapted weight is no parameter, and fuses; merged, the model gives what it gave, but for rounding."""
    if place.fused:
        huggingface.install(on_unfused="error")
    model = with_lora(small(name, torch.bfloat16, place.device, NAME)).eval()
    ids = tokens(place.device)
    losses = [model(input_ids=ids, labels=ids).loss for _ in range(4)]
    losses[-1].backward()
    assert all(loss == losses[0] for loss in losses)
    with torch.no_grad():
        adapted = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        assert relative_error(merged(input_ids=ids).logits, adapted) < 3e-2  # BF16: the adapted weight is rounded too
        assert isinstance(experts_of(merged)[0].down_proj, nn.Parameter)
