"""Options of the model, the trainer and the run folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from strop.config.base import Idle, Options, Problem, not_negligible


class ModelOptions(Options):
    """The language model that is trained."""

    path: str = Field(description="A Hugging Face folder or name.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the weights; float32 is the fast one on CPU. bfloat16 learns by float32 master copies: with "
        "gradients and AdamW's moments 20 bytes a weight, where float32 takes 16.",
    )
    device: str = Field(default="auto", description="auto (a GPU if there is one), cpu, cuda, cuda:1, ...")
    trust_remote_code: bool = Field(default=False, description="Run code that comes with the model folder.")


class AdamWOptions(Options):
    """AdamW and its learning rate. Schedules count optimizer steps."""

    lr: float = Field(default=1e-6, ge=1e-12, description="Peak learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="From the peak to 0 over the run, or constant."
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Optimizer steps over which the learning rate rises to its peak: of n, step k has k/n of it.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW's decay of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW's decay of the second moment.")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled weight decay.")
    max_grad_norm: float = Field(
        default=1.0,
        ge=1e-9,
        allow_inf_nan=True,
        description="Gradients are scaled down to this global norm; inf means never.",
    )

    def problems(self) -> Iterator[Problem]:
        yield from not_negligible("weight_decay", self.weight_decay)


class ProcessesOptions(AdamWOptions):
    """Of every trainer: AdamW, and the processes that share its work. Schedules count optimizer steps."""

    kind: Any  # a word of its own in each kind, as the two below
    max_tokens_per_micro_batch: int = Field(
        default=4096,
        ge=1,
        description="Token positions of one forward pass, padding included; a longer sequence goes alone.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep only the inputs of each layer and compute the rest again in the backward pass: less memory for "
        "about a third more work.",
    )
    num_processes: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Processes that share weights, optimizer and the passes of a step, one a GPU; strop starts them on this "
        "machine. Under torchrun leave it out: there it is the number of processes launched.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Of the processes, how many divide each layer, the embedding and the head among them and make the same "
        "passes: each has 1/n of every matrix. Must divide trainer.num_processes and the model's heads; 1 means that a process "
        "has whole layers within a pass.",
    )
    process_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86400,
        description="Seconds that a process waits for another one within a step, or to come up, before the run ends with its "
        "name.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of torch; none, or more than there are cores, means all that this process may use, or its "
        "share of them beside others.",
    )

    def idle(self) -> Iterator[Idle]:
        if self.num_processes == 1:
            yield Idle("process_timeout_s", "is only used when trainer.num_processes is above 1")

    def warnings(self) -> Iterator[str]:
        if self.warmup_steps == 1 and self.lr_schedule == "constant":
            yield "trainer.warmup_steps = 1 is the same as 0: the only step of the warm-up has the whole learning rate."

    def _divides(self, other: str) -> Iterator[Problem]:
        """Processes that divide layers, times those that divide something else, must divide all."""
        number = getattr(self, other)
        if self.num_processes % (self.tensor_parallel * number):
            key, beside = "tensor_parallel", ""
            if number > 1:
                key, beside = other, f", times trainer.tensor_parallel = {self.tensor_parallel},"
            yield Problem(
                key,
                f"must{beside} divide trainer.num_processes = {self.num_processes}, got {getattr(self, key)}. Set both, "
                "under a launcher too.",
            )


class TorchTrainerOptions(ProcessesOptions):
    """AdamW in one process or in several (FSDP2)."""

    why_not: ClassVar[dict[str, str]] = {
        "pipeline_parallel": "has none: trainer.num_processes shares weights, layer by layer, and batches",
        "distributed_optimizer": "has none: trainer.num_processes shares what the optimizer remembers, always",
    }

    kind: Literal["torch"] = "torch"
    layout: Literal["auto", "padded", "packed", "shared"] = Field(
        default="auto",
        description="Rows of a micro-batch: padded to like length, packed with sequences end to end, or shared, where a prompt "
        "stands once before all its responses; auto takes for each step what costs least of those that the model can read.",
    )
    context_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Of the processes, how many divide the tokens of every row among them, for long sequences: each keeps 1/n "
        "of the activations, and has all tokens of 1/n of the heads in attention. Must divide the model's heads, and, times "
        "trainer.tensor_parallel, trainer.num_processes.",
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self._divides("context_parallel")
        if self.context_parallel > 1 and self.layout not in ("auto", "padded"):
            yield Problem(
                "layout",
                f"must be padded or auto with trainer.context_parallel = {self.context_parallel}, got {self.layout}: a row "
                "that is divided has one sequence.",
            )


class MegatronTrainerOptions(ProcessesOptions):
    """AdamW on a model made of Megatron-Core's layers, in one process a GPU: an extra, strop[megatron]. Rows are padded."""

    why_not: ClassVar[dict[str, str]] = {
        "layout": "has none: its rows are padded to like length",
        "context_parallel": "has none: trainer.tensor_parallel and trainer.pipeline_parallel divide a model there",
    }

    kind: Literal["megatron"] = "megatron"
    pipeline_parallel: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Of the processes, how many have a run of the layers each, one after the other, and send hidden states on: "
        "micro-batches pass through them in turn. Must divide the model's layers, and, times trainer.tensor_parallel, "
        "trainer.num_processes; the processes beyond that share a batch.",
    )
    distributed_optimizer: bool = Field(
        default=True,
        description="Of the processes that share a batch each keeps the moments, and beside bfloat16 weights the float32 ones, "
        "of its part of the weights alone; false: each keeps all of them.",
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from self._divides("pipeline_parallel")

    def idle(self) -> Iterator[Idle]:
        yield from super().idle()
        if self.num_processes == self.tensor_parallel * self.pipeline_parallel:
            yield Idle(
                "distributed_optimizer",
                "is only used when trainer.num_processes is above trainer.tensor_parallel x trainer.pipeline_parallel",
            )


TrainerOptions = Annotated[TorchTrainerOptions | MegatronTrainerOptions, Field(discriminator="kind")]


class SFTTrainerOptions(TorchTrainerOptions):
    """AdamW in this process, with the learning rate that imitation usually takes."""

    lr: float = Field(default=1e-5, ge=1e-12, description="Peak learning rate.")


class RunOptions(Options):
    """Where to write, and what."""

    folder: str = Field(default="runs/{name}", description="The run folder; {name} stands for the config file's name.")
    overwrite: bool = Field(default=False, description="Replace a run that is in the folder already.")
    checkpoint_every_steps: int = Field(
        default=0,
        ge=0,
        description="Write a checkpoint after every so many steps, and when the run stops; 0 means never.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="How many of the newest checkpoints stay.")
    keep_every_steps: int = Field(
        default=0,
        ge=0,
        description="A checkpoint is written after every so many steps, too, and stays for good; 0 means never.",
    )
    keep_best_checkpoint: bool = Field(
        default=False,
        description="A checkpoint is written after a step whose evaluation (strop sft: validation) is the best so far, too, "
        "and stays until there is a better one; --resume best goes on from it.",
    )

    def problems(self) -> Iterator[Problem]:
        rest = self.folder.replace("{name}", "")
        if not self.folder.strip() or "\0" in self.folder:
            yield Problem("folder", f"must be the path of a folder, got {self.folder!r}. Use . for the one you are in.")
        elif "{" in rest or "}" in rest:
            yield Problem(
                "folder",
                f"must have no braces but {{name}}, got {self.folder!r}: only {{name}} is replaced, by the config file's name.",
            )

    def idle(self) -> Iterator[Idle]:
        if self.checkpoint_every_steps == 0:
            for name in ("keep_checkpoints", "keep_every_steps", "keep_best_checkpoint"):
                yield Idle(name, "is only used when run.checkpoint_every_steps is above 0")

    def is_checkpoint_due(self, step: int, *, is_best: bool) -> bool:
        """Whether a checkpoint is written after this step, whose evaluation may be the best so far."""
        if self.checkpoint_every_steps == 0:
            return False
        every = (self.checkpoint_every_steps, self.keep_every_steps)
        return any(n > 0 and step % n == 0 for n in every) or (is_best and self.keep_best_checkpoint)


class TrainRunOptions(RunOptions):
    """How long to train, where and what to write."""

    num_steps: int = Field(default=100, ge=1, description="Batches of rollouts.")
    save_rollouts: bool = Field(default=True, description="Write sampled texts and scores to rollouts/.")
    rollout_form: Literal["whole", "text"] = Field(
        default="whole",
        description="Write rollouts with all that training on them again and strop replay take, or only what a person reads.",
    )
    profile_steps: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Steps, after the first one of the process, of which torch's profiler writes a trace to profile/; 0 means "
        "none.",
    )

    def idle(self) -> Iterator[Idle]:
        yield from super().idle()
        if not self.save_rollouts:
            yield Idle("rollout_form", "is only used when run.save_rollouts = true")


class SFTRunOptions(RunOptions):
    """How long to imitate, where and what to write."""

    num_epochs: int = Field(
        default=1, ge=1, description="Passes over the demonstrations; the last batch may be a smaller one."
    )
    num_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps, each on a whole batch; none means as many as num_epochs makes.",
    )

    def idle(self) -> Iterator[Idle]:
        yield from super().idle()
        if self.num_steps is not None:
            yield Idle("num_epochs", "cannot act beside run.num_steps, which says how long the run is")
