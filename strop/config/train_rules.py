"""Rules between the tables of `strop train`: what does not fit, what cannot act beside what, what follows from what."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from strop.config import distillation, off_policy
from strop.config.advantage import NEEDS_GROUP, TAKES_TOKEN_REWARDS
from strop.config.base import Derived, Idle, Problem
from strop.config.critic import CriticOptions
from strop.config.engine import VLLM_HOTTEST, TorchEngineOptions, VLLMInProcessOptions
from strop.config.filtering import PerTokenPenaltyOptions, SoftOverlongOptions
from strop.config.lora import LoraOptions
from strop.config.sampling import FunctionRewardOptions, SlimeRewardOptions, rewarded_per
from strop.config.training import AdamWOptions, MegatronTrainerOptions, ModelOptions, ProcessesOptions

if TYPE_CHECKING:
    from strop.config.root import TrainConfig


def problems(config: TrainConfig) -> Iterator[Problem]:
    """Rules that span several tables and are broken."""
    yield from _steps(config)
    yield from _advantages(config)
    yield from _rewards(config)
    yield from _length_penalty(config)
    yield from _adapters(config)
    yield from distillation.problems_beside(config)
    yield from off_policy.problems_beside(config)
    yield from _guards(config)
    yield from _engine(config)
    yield from _scorers(config)
    yield from processes_fit(config.trainer, config.model, config.lora)
    if config.has_critic and isinstance(config.trainer, MegatronTrainerOptions):
        yield Problem(
            "trainer.kind",
            f"must be torch with algorithm.advantage.kind = {config.algorithm.advantage.kind}, got megatron: a critic is not "
            "made of Megatron-Core's layers here.",
        )


def _engine(config: TrainConfig) -> Iterator[Problem]:
    if isinstance(config.engine, TorchEngineOptions):
        if config.lora.is_on and config.engine.num_replicas:
            yield Problem(
                "engine.num_replicas",
                f"must be 0 with lora.rank = {config.lora.rank}, got {config.engine.num_replicas}: replicas are given whole "
                "weights, and adapters are not added to them yet.",
            )
        return
    if isinstance(config.engine, VLLMInProcessOptions):
        yield from _in_process(config)
    if config.engine.kind not in ("vllm", "vllm_in_process"):
        return
    asked = {f"eval.{f'sets.{name}.' if name else ''}": own.temperature for name, own in config.eval.all_sets.items()}
    for table, temperature in {"rollout.": config.rollout.temperature, **asked}.items():
        if temperature is not None and temperature > VLLM_HOTTEST:
            yield Problem(
                f"{table}temperature",
                f"must be at most {VLLM_HOTTEST:g} with engine.kind = {config.engine.kind}, got {temperature:g}: vLLM takes no "
                "other.",
            )


def _in_process(config: TrainConfig) -> Iterator[Problem]:
    number, device = config.trainer.num_processes, config.model.device
    if number > 1:
        yield Problem(
            "trainer.num_processes",
            f"must be 1 with engine.kind = vllm_in_process, got {number}: vLLM would have to join the "
            "trainer's processes. Use servers (engine.kind = vllm).",
        )
    if device.startswith("cuda:"):
        yield Problem(
            "model.device",
            f"must be auto, cuda or cpu with engine.kind = vllm_in_process, got {device}: vLLM takes the first GPU that it "
            "sees. CUDA_VISIBLE_DEVICES says which that is.",
        )


def _scorers(config: TrainConfig) -> Iterator[Problem]:
    reward, number = config.reward, config.rollout.num_scorers
    is_batched = isinstance(reward, FunctionRewardOptions | SlimeRewardOptions) and reward.batched
    if number and (reward.kind == "none" or is_batched):
        why = (
            "there is nothing to score"
            if reward.kind == "none"
            else "its function is called once a step, with all rollouts"
        )
        yield Problem("rollout.num_scorers", f"must be 0 with such a reward, got {number}: {why}.")


def _guards(config: TrainConfig) -> Iterator[Problem]:
    for name, action in config.guards.actions.items():
        if action == "rollback" and config.run.checkpoint_every_steps == 0:
            yield Problem(
                f"guards.on_{name}",
                "must be stop or skip with run.checkpoint_every_steps = 0, got rollback: there is no checkpoint to go back to. "
                "Set run.checkpoint_every_steps.",
            )


def _steps(config: TrainConfig) -> Iterator[Problem]:
    prompts, updates = config.rollout.prompts_per_step, config.algorithm.updates_per_batch
    if prompts % updates:
        yield Problem(
            "algorithm.updates_per_batch",
            f"must divide rollout.prompts_per_step, got {updates} and {prompts}. "
            f"With {prompts} prompts it may be {', '.join(map(str, _divisors(prompts)))}.",
        )
    alone, num_steps = config.critic.only_first_steps, config.run.num_steps
    if alone >= num_steps:
        yield Problem(
            "critic.only_first_steps",
            f"must be below run.num_steps, got {alone} and {num_steps}: the policy would never learn.",
        )
        return
    batches, by_updates = f"run.num_steps = {num_steps}", f"x algorithm.updates_per_batch = {updates}"
    learning = f"({batches} - critic.only_first_steps = {alone})" if alone else batches
    yield from warmup_fits("trainer", config.trainer, config.num_optimizer_steps, f"{learning} {by_updates}")
    if config.has_critic:
        yield from warmup_fits("critic", config.critic, config.num_critic_steps, f"{batches} {by_updates}")


def warmup_fits(table: str, options: AdamWOptions, num_optimizer_steps: int, product: str) -> Iterator[Problem]:
    """A warmup that would outlast the run."""
    if options.warmup_steps >= num_optimizer_steps:
        yield Problem(
            f"{table}.warmup_steps",
            f"must be below the run's {num_optimizer_steps} optimizer steps ({product}), got {options.warmup_steps}.",
        )


def processes_fit(trainer: ProcessesOptions, model: ModelOptions, lora: LoraOptions) -> Iterator[Problem]:
    """Several processes on one device, and what of a model they can divide."""
    is_megatron = isinstance(trainer, MegatronTrainerOptions)
    if is_megatron and lora.is_on:
        yield Problem(
            "lora.rank",
            f"must be none with trainer.kind = megatron, got {lora.rank}: Megatron-Core's layers have no adapters here. "
            "trainer.kind = torch has them.",
        )
    elif trainer.tensor_parallel > 1 and lora.is_on:
        yield Problem(
            "trainer.tensor_parallel",
            f"must be 1 with lora.rank = {lora.rank}, got {trainer.tensor_parallel}: adapters are not divided. "
            "trainer.num_processes alone shares the weights below them.",
        )
    if (trainer.num_processes > 1 or is_megatron) and model.device.startswith("cuda:"):
        beside = "trainer.kind = megatron" if is_megatron else f"trainer.num_processes = {trainer.num_processes}"
        yield Problem(
            "model.device",
            f"must be auto, cuda or cpu with {beside}, got {model.device}: each process takes the GPU of its own number. "
            "CUDA_VISIBLE_DEVICES says which there are.",
        )


def _advantages(config: TrainConfig) -> Iterator[Problem]:
    """Where a teacher is listened to alone, no advantage is made of rewards."""
    kind, group_size, policy_loss = (
        config.algorithm.advantage.kind,
        config.rollout.group_size,
        config.algorithm.policy_loss,
    )
    if config.distillation.alone:
        return
    if group_size == 1 and kind in NEEDS_GROUP:
        yield Problem(
            "rollout.group_size",
            f"must be 2 or more with algorithm.advantage.kind = {kind}, got 1: a sample that is its own baseline "
            "has advantage 0, and nothing would be learned.",
        )
    if config.algorithm.advantage.kind == "pass_at_k" and config.algorithm.advantage.k >= group_size:
        yield Problem(
            "algorithm.advantage.k",
            f"must be below rollout.group_size, got {config.algorithm.advantage.k} and {group_size}. "
            "With one set of all rollouts every advantage is 0.",
        )
    per = rewarded_per(config.reward)
    if policy_loss.needs_one_advantage and kind in TAKES_TOKEN_REWARDS and per != "response":
        yield Problem(
            "reward.per",
            f"must be response with algorithm.policy_loss.kind = {policy_loss.kind}, got {per}: it is a "
            f"loss of whole sequences, with one advantage each, and {kind} gives tokens the rewards that follow them.",
        )


def _rewards(config: TrainConfig) -> Iterator[Problem]:
    if config.filter.equal_rewards and config.rollout.group_size == 1:
        yield Problem(
            "filter.equal_rewards",
            "must be false with rollout.group_size = 1, got true: one reward equals itself, and no group would be left.",
        )
    if config.reward.kind == "dataset" and config.data.kind != "reasoning_gym":
        yield Problem(
            "reward.kind",
            f"must not be dataset with data.kind = {config.data.kind}: that source has no scorer of its own. "
            "Use exact, number, math, code or function.",
        )
    for name, own in config.eval.all_sets.items():
        if own.data.kind == "reasoning_gym" or (own.reward or config.reward).kind != "dataset":
            continue
        table = f"eval.sets.{name}" if name else "eval"
        advice = "Give it a reward of its own." if own.reward is None else f"Set another {table}.reward.kind."
        if not name:
            advice = "Make it a table [eval.sets.NAME], which may have a reward of its own."
        yield Problem(
            f"{table}.data.kind",
            f"must be reasoning_gym where the reward is of kind dataset, got {own.data.kind}: that source has no "
            f"scorer of its own. {advice}",
        )


def _adapters(config: TrainConfig) -> Iterator[Problem]:
    if config.lora.is_on and config.algorithm.kl.coef > 0 and config.algorithm.kl.refresh_steps:
        yield Problem(
            "algorithm.kl.refresh_steps",
            f"must be 0 with lora.rank, got {config.algorithm.kl.refresh_steps}: the reference is the model without adapters, "
            "and cannot become the policy.",
        )


def _length_penalty(config: TrainConfig) -> Iterator[Problem]:
    penalty, limit = config.length_penalty, config.rollout.max_response_tokens
    if isinstance(penalty, SoftOverlongOptions) and penalty.buffer_of(limit) > limit:
        yield Problem(
            "length_penalty.buffer_tokens",
            f"must be at most rollout.max_response_tokens, got {penalty.buffer_tokens} and {limit}: the penalty grows over "
            "the last tokens before that limit.",
        )
    if isinstance(penalty, PerTokenPenaltyOptions) and penalty.target_tokens >= limit:
        yield Problem(
            "length_penalty.target_tokens",
            f"must be below rollout.max_response_tokens, got {penalty.target_tokens} and {limit}: no response would be "
            "longer than the target.",
        )
    if penalty.kind != "none" and config.algorithm.advantage.kind == "pass_at_k":
        yield Problem(
            "length_penalty.kind",
            f"must be none with algorithm.advantage.kind = pass_at_k, got {penalty.kind}: a reward that a penalty brings "
            "below algorithm.advantage.success_reward would no longer count as a success.",
        )


def idle(config: TrainConfig) -> Iterator[Idle]:
    """Options of one table that cannot act beside those of another."""
    if not config.has_critic:
        for name in CriticOptions.model_fields:
            yield Idle(f"critic.{name}", "is only used when algorithm.advantage.kind = gae")
    if not (config.algorithm.uses_old_logprobs or config.distillation.is_on):
        kind = config.algorithm.policy_loss.kind
        yield Idle("algorithm.old_logprobs", f"cannot act: policy_loss.kind = {kind} has no ratio")
    if not config.eval.all_sets and config.run.checkpoint_every_steps:
        yield Idle("run.keep_best_checkpoint", "is only used with held-out prompts ([eval.data] or [eval.sets.NAME])")
    if not config.filter.drops_groups:
        yield Idle("rollout.prompts_per_round", "is only used with a filter, which may drop groups")
    kl_in_loss = config.algorithm.kl.coef > 0 and config.algorithm.kl.place == "loss"
    if not (kl_in_loss or config.algorithm.ratio_moves):
        yield Idle(
            "guards.max_kl_jump",
            "cannot act with algorithm.updates_per_batch = 1 and no KL in the loss: in the only update the policy is the old "
            "policy, and their KL is 0",
        )
    yield from distillation.idle_beside(config)


def derived(config: TrainConfig) -> Iterator[Derived]:
    """What options stand for that follow from another table."""
    limit = config.rollout.max_response_tokens
    if config.guards.max_logprob_gap is None:
        recorded = config.rollout.from_folder is not None
        source = "rollout.from_folder" if recorded else f"model.dtype = {config.model.dtype}"
        yield Derived("guards.max_logprob_gap", config.max_logprob_gap, source)
    for name, own in config.eval.all_sets.items() if config.eval.max_response_tokens is None else ():
        if own.max_response_tokens is None:
            table = f"eval.sets.{name}" if name else "eval"
            yield Derived(f"{table}.max_response_tokens", limit, "rollout.max_response_tokens")
    if config.filter.drops_groups and config.rollout.prompts_per_round is None:
        yield Derived("rollout.prompts_per_round", config.rollout.round_size, "rollout.prompts_per_step")
    if isinstance(config.length_penalty, SoftOverlongOptions) and config.length_penalty.buffer_tokens is None:
        buffer = config.length_penalty.buffer_of(limit)
        yield Derived("length_penalty.buffer_tokens", buffer, "rollout.max_response_tokens")
    yield from distillation.derived_beside(config)


def warnings(config: TrainConfig) -> Iterator[str]:
    """Options that wait for a step the run does not have: allowed, since runs are shortened to try them."""
    last = config.run.num_steps
    yield from _recorded(config)
    for path, every, consequence in (
        ("eval.every_steps", config.eval.every_steps, "the only evaluations are those before and after the run"),
        (
            "algorithm.kl.refresh_steps",
            config.algorithm.kl.refresh_steps,
            "no step learns against a refreshed reference",
        ),
    ):
        if every >= last:
            yield f"{path} = {every} is not below run.num_steps = {last}: {consequence}."
    for name, consequence in (
        ("checkpoint_every_steps", "the only checkpoint is the one at the end"),
        ("keep_every_steps", "no checkpoint stays for good"),
    ):
        value = getattr(config.run, name)
        if value > last:
            yield f"run.{name} = {value} is above run.num_steps = {last}: {consequence}."
    yield from _unreached(config)
    yield from unreached_schedule(config.trainer, config.num_optimizer_steps)


def _unreached(config: TrainConfig) -> Iterator[str]:
    """What adapts or keeps over more steps than there are."""
    last, every, keep = config.run.num_steps, config.run.checkpoint_every_steps, config.run.keep_checkpoints
    kl = config.algorithm.kl
    if last == 1 and kl.coef > 0 and kl.target is not None:
        yield "algorithm.kl.target cannot act with run.num_steps = 1: the coefficient changes after the first batch."
    if last == 1 and config.algorithm.entropy_target is not None:
        yield "algorithm.entropy_target cannot act with run.num_steps = 1: the weight changes after the first batch."
    for_good = config.run.keep_every_steps or last
    num_checkpoints = len({*range(every, last, every), *range(for_good, last, for_good), last}) if every else 0
    default = type(config.run).model_fields["keep_checkpoints"].default
    if every and keep > num_checkpoints and keep != default and not config.run.keep_best_checkpoint:
        yield (
            f"run.keep_checkpoints = {keep} is above the {num_checkpoints} that the run makes (run.num_steps = {last}, "
            f"run.checkpoint_every_steps = {every}): none is removed."
        )


def unreached_schedule(trainer: AdamWOptions, num_optimizer_steps: int) -> Iterator[str]:
    """What of the optimizer needs a second step."""
    if trainer.lr_schedule != "constant" and num_optimizer_steps - trainer.warmup_steps <= 1:
        yield (
            f"trainer.lr_schedule = {trainer.lr_schedule} is the same as constant: of the run's {num_optimizer_steps} "
            "optimizer steps one comes after the warm-up, and has the peak."
        )
    for name in ("beta1", "beta2"):
        value, default = getattr(trainer, name), type(trainer).model_fields[name].default
        if num_optimizer_steps == 1 and value != default:
            yield f"trainer.{name} = {value:g} cannot act in a run of one optimizer step: AdamW corrects the first one for it."


def _recorded(config: TrainConfig) -> Iterator[str]:
    """What training on recorded rollouts means, where that is not the policy's own sampling any more."""
    folder, algorithm = config.rollout.from_folder, config.algorithm
    if folder is None:
        return
    given = f"rollout.from_folder = {folder}: off-policy"
    corrected = algorithm.correction.kind != "none" or algorithm.veto_ratio is not None
    if algorithm.old_logprobs == "rollout":
        yield f"{given}; ratios are to the recorded log-probabilities (algorithm.old_logprobs = rollout)."
    elif corrected:
        yield (
            f"{given}; ratios are to the trainer's own log-probabilities, and algorithm.correction weighs the gap to the "
            "recorded ones."
        )
    else:
        yield (
            f"{given}, and nothing corrects for it: ratios begin at 1, as if the policy had sampled the rollouts. Use a loss "
            "with a ratio and algorithm.old_logprobs = rollout, or an algorithm.correction."
        )
    yield (
        "[reward], [filter], [curriculum] and [length_penalty] do not act on recorded rollouts: their rewards are the "
        "recorded ones."
    )


def _divisors(number: int, most: int = 12) -> list[int]:
    """The smallest divisors of a number."""
    small = (n for n in range(1, min(number, 10_000) + 1) if number % n == 0)
    return list(islice(small, most))
