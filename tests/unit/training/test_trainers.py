"""Hugging Face's Trainer and Lightning: the mechanism accounted for, resumed through their own checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpmf
from dpmf.errors import ArgumentError, MissingExtraError, TrainingError

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("lightning")
from acceptance.test_audit import CLIP, RECORDS, SIGMA, WIDTH, Records, Trace, findings  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from private_runs import recorded  # noqa: E402

from dpmf.training.huggingface import FILE, default_losses, make_trainer_private  # noqa: E402
from dpmf.training.lightning import Private  # noqa: E402

MECHANISM = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.BallsInBins(2, 8))
N, STOP, EVERY = 16, 11, 5  # interrupted after 11 steps, with checkpoints after 5 and 10
OPTIONS: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "seed": 3}  # with two empty batches


def generator() -> Any:
    torch.set_num_threads(1)
    return torch.Generator().manual_seed(1)


# Hugging Face.


def sentences() -> list[dict[str, Any]]:
    draw = generator()
    return [
        {"input_ids": torch.randint(0, 20, (5,), generator=draw), "labels": torch.randint(0, 3, (), generator=draw)}
        for _ in range(20)
    ]


def classifier() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=3, **sizes)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.1)
    return peft.get_peft_model(transformers.BertForSequenceClassification(config), lora)


def fine_tuning(directory: Path, model: Any = None, data: Any = None, **settings: Any) -> Any:
    """A stock script."""
    generator()
    given = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_steps": EVERY,
        "logging_steps": EVERY,
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
    } | settings
    args = transformers.TrainingArguments(
        str(directory), report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="steps", **given
    )
    model = classifier() if model is None else model
    return transformers.Trainer(model, args, train_dataset=sentences() if data is None else data)


class StopTraining(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STOP:
            raise KeyboardInterrupt


def trained(model: Any) -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])


def test_a_lora_script_with_a_hugging_face_trainer(tmp_path: Path) -> None:
    whole = fine_tuning(tmp_path / "whole", save_strategy="no")
    private = make_trainer_private(whole, MECHANISM, **OPTIONS)
    before = trained(whole.model)
    whole.train()
    assert private is whole.private
    assert (private.steps_made, whole.state.global_step, private.steps_left) == (N, N, 0)
    moved = trained(whole.model) != before
    assert moved.sum() == sum(p.numel() for p in whole.model.parameters() if p.requires_grad)
    # Nothing about training records is reported, and evaluation works as ever.
    assert not {"loss", "grad_norm", "train_loss"} & {name for line in whole.state.log_history for name in line}
    assert whole.evaluate(sentences())["eval_loss"] > 0
    with pytest.raises(TrainingError, match="has made 16 steps already"):
        whole.train()

    interrupted = fine_tuning(tmp_path / "parts")
    make_trainer_private(interrupted, MECHANISM, **OPTIONS)
    interrupted.add_callback(StopTraining())
    with pytest.raises(KeyboardInterrupt):
        interrupted.train()
    resumed = fine_tuning(tmp_path / "parts")
    make_trainer_private(resumed, MECHANISM, **OPTIONS | {"seed": 4})
    resumed.train(resume_from_checkpoint=True)
    assert np.array_equal(trained(resumed.model), trained(whole.model))
    assert resumed.state.epoch == 2

    # A checkpoint that is not the last one, or without its noise, is refused.
    for checkpoint, message in (("checkpoint-5", "later"), ("checkpoint-10", f"has no {FILE}")):
        again = fine_tuning(tmp_path / "parts")
        make_trainer_private(again, MECHANISM, **OPTIONS)
        if checkpoint == "checkpoint-10":
            (tmp_path / "parts" / checkpoint / FILE).unlink()
        with pytest.raises(TrainingError, match=message):
            again.train(resume_from_checkpoint=str(tmp_path / "parts" / checkpoint))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1, got 2"),
        ({"num_train_epochs": 3}, r"at most 16 steps \(2 epochs\), as the mechanism does, got 24"),
        ({"max_steps": 17}, "at most 16 steps"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing=False"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=False"),
        ({"push_to_hub": True, "hub_strategy": "all_checkpoints"}, "as secret as the data"),
    ],
)
def test_settings_of_a_trainer_that_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"trainer must have .*{message}") as caught:
        make_trainer_private(_unstarted(tmp_path, **settings), MECHANISM, **OPTIONS)
    assert "\n" not in str(caught.value)


def _unstarted(directory: Path, **settings: Any) -> Any:
    trainer = fine_tuning(directory, torch.nn.Linear(2, 2), **{**settings, "push_to_hub": False})
    trainer.args.push_to_hub = settings.get("push_to_hub", False)
    return trainer


def test_other_trainers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"trainer must be a transformers\.Trainer"):
        make_trainer_private("trainer", MECHANISM, **OPTIONS)
    trainer = fine_tuning(tmp_path, torch.nn.Linear(2, 2))
    trainer.compute_loss_func = lambda *_: None
    with pytest.raises(ArgumentError, match="record_losses must be given"):
        make_trainer_private(trainer, MECHANISM, **OPTIONS)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[trainers\]' in a clone"):
        make_trainer_private(trainer, MECHANISM, **OPTIONS)


def test_the_loss_of_a_record_does_not_depend_on_others() -> None:
    class GPTLMHeadModel(torch.nn.Module):
        pass

    def losses(model: Any, logits: Any, labels: Any) -> Any:
        trainer = type("", (), {"model": model, "args": type("", (), {"label_smoothing_factor": 0.0})})
        return default_losses(trainer)(type("", (), {"logits": logits}), {"labels": labels})

    draw = generator()
    tokens = torch.randint(0, 7, (3, 5), generator=draw)
    tokens[1, 3:] = tokens[2, :] = -100  # one shorter, one without any label
    logits, plain = torch.randn(3, 5, 7, generator=draw), torch.nn.Module()
    cross = torch.nn.functional.cross_entropy
    causal = losses(GPTLMHeadModel(), logits, tokens)
    for i, count in enumerate((4, 2, 0)):
        alone = cross(logits[i, :count], tokens[i, 1 : count + 1]) if count else torch.tensor(0.0)
        torch.testing.assert_close(causal[i], alone)
        assert torch.equal(losses(GPTLMHeadModel(), logits[i : i + 1], tokens[i : i + 1]), causal[i : i + 1])
    torch.testing.assert_close(losses(plain, logits, tokens)[1], cross(logits[1, :3], tokens[1, :3]))
    classes = torch.tensor([0, 2, 1])
    torch.testing.assert_close(losses(plain, logits[:, 0], classes), cross(logits[:, 0], classes, reduction="none"))
    torch.testing.assert_close(losses(plain, logits[:, 0, :1], torch.ones(3)), (logits[:, 0, 0] - 1).square())
    several = losses(plain, logits[:, 0], torch.ones(3, 7))
    torch.testing.assert_close(several, -torch.nn.functional.logsigmoid(logits[:, 0]).mean(dim=1))
    with pytest.raises(TrainingError, match="give make_trainer_private record_losses"):
        losses(plain, None, classes)


# Lightning.


class Network(LightningModule):
    def __init__(self, reduction: str = "mean"):
        super().__init__()
        torch.manual_seed(0)
        self.reduction = reduction
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 3))

    def training_step(self, batch: Any, index: int) -> Any:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1], reduction=self.reduction)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("accuracy", (self.layers(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, N)]


class StopFitting(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STOP:
            raise RuntimeError("stopped")


def fit(directory: Path, *more: Any, module: Any = None, resume: str | None = None, **settings: Any) -> Any:
    draw = generator()
    data = torch.utils.data.TensorDataset(
        torch.randn(20, 4, generator=draw), torch.randint(0, 3, (20,), generator=draw)
    )  # fmt: skip
    callback = Private(MECHANISM, **OPTIONS)
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, ModelCheckpoint(directory, every_n_train_steps=EVERY, save_top_k=-1), *more],
        **{"max_epochs": 2, **settings},
    )
    module = module or Network()
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer.fit(module, loader, loader, ckpt_path=resume and directory / resume)
    return module, callback


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path) -> None:
    module, callback = fit(tmp_path / "whole")
    assert callback.private.steps_made == N
    with pytest.raises(RuntimeError, match="stopped"):
        fit(tmp_path / "parts", StopFitting())
    resumed, _ = fit(tmp_path / "parts", resume="epoch=1-step=10.ckpt")
    assert np.array_equal(trained(resumed), trained(module))
    with pytest.raises(TrainingError, match="later"):
        fit(tmp_path / "parts", resume="epoch=0-step=5.ckpt")
    (tmp_path / "parts" / "epoch=1-step=10.ckpt.dpmf").unlink()
    with pytest.raises(TrainingError, match=r"has no epoch=1-step=10\.ckpt\.dpmf beside it"):
        fit(tmp_path / "parts", resume="epoch=1-step=10.ckpt")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_epochs": 3}, "trainer must have max_epochs of at most 2"),
        ({"accumulate_grad_batches": 2}, "trainer must have accumulate_grad_batches=1, got 2"),
        ({"gradient_clip_val": 1.0}, "trainer must have no gradient_clip_val"),
        ({"module": "sum"}, "the loss is a sum over the batch"),
    ],
)
def test_what_lightning_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    if settings.get("module"):
        settings = {"module": Network("sum")}
    with pytest.raises((ArgumentError, TrainingError), match=message):
        fit(tmp_path, **settings)


# The audit: what the trainers train is the mechanism.


class Vector(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class VectorModule(LightningModule):
    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, index: int) -> Any:
        return (-self.model(batch)).mean() if len(batch) else self.model(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def watch(private: Any, weight: Any, trace: Trace) -> None:
    """Record what is summed and what is released, as the audit does."""
    optimizer, sums = private.optimizer, []
    recorded(private, sums)
    expected = RECORDS / private.mechanism.batching.batches_per_epoch
    inner = optimizer.original_optimizer.step

    def step() -> Any:
        trace.sums.append(sums[-1] / CLIP)
        records = private.sampler.batch(private.steps_made - 1)
        rows = np.zeros((len(records), WIDTH))
        rows[np.arange(len(rows)), records] = -1.0  # how each record pushes, clipped
        trace.gradients.append(rows)
        before = weight.detach().double().numpy().ravel().copy()
        result = inner()
        trace.releases.append((before - weight.detach().double().numpy().ravel()) * expected / CLIP)
        return result

    optimizer.original_optimizer.step = step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["hugging face", "lightning"])
def test_the_audit_finds_nothing_in_what_trainers_do(kind: str, half: bool, tmp_path: Path) -> None:
    """With layers in bfloat16, too: gradients are widened before they are clipped."""
    mechanism = dpmf.Mechanism(dpmf.strategies.bsr(3), dpmf.reshuffled(3, 5))
    options = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "seed": 3}
    trace, model = Trace(), Vector()
    if kind == "hugging face":
        data = [{"x": Records()[i]} for i in range(RECORDS)]
        args = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=3,
            num_train_epochs=3,
            bf16=half,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            lr_scheduler_type="constant",
        )
        optimizers = (torch.optim.SGD(model.parameters(), lr=1.0), None)
        trainer = transformers.Trainer(model, args, train_dataset=data, optimizers=optimizers)
        private = make_trainer_private(trainer, mechanism, record_losses=lambda out, _: -out[:, 0], **options)
        watch(private, model.layer.weight, trace)
        trainer.train()
    else:
        callback = Private(mechanism, **options)

        class Watch(Callback):
            def on_train_start(self, *_: Any) -> None:
                watch(callback.private, model.layer.weight, trace)

        trainer = Trainer(
            accelerator="cpu",
            max_epochs=3,
            precision="bf16-mixed" if half else "32-true",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[callback, Watch()],
        )
        trainer.fit(VectorModule(model), torch.utils.data.DataLoader(Records()))
    assert findings(trace, mechanism) == []


def test_a_trainer_keeps_the_records_of_a_user_together(tmp_path: Path) -> None:
    users = [0, 0, 0, *range(1, 18)]  # one has more records than are computed at a time
    trainer = fine_tuning(tmp_path, save_strategy="no", num_train_epochs=1)
    private = make_trainer_private(trainer, MECHANISM, unit=users, **OPTIONS)
    trainer.train()
    assert private.steps_made == 8
