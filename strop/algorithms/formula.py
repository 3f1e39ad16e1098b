"""The objective in words of mathematics, with the numbers in it: what strop prints before the first step."""

from __future__ import annotations

from strop.algorithms.support import support_lines
from strop.algorithms.variants import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from strop.config import PRESETS, TrainConfig, preset_values
from strop.config.advantage import GAEOptions
from strop.config.filtering import PerTokenPenaltyOptions, SoftOverlongOptions
from strop.config.sampling import named_weights
from strop.config.tree import flatten, values

_WEIGHTS = {
    "token_mean": "w_t = 1 / (trainable tokens of the step)",
    "sequence_mean": "w_t = 1 / (sequences of the step x trainable tokens of its sequence)",
    "prompt_mean": "w_t = 1 / (prompts of the step x trainable tokens of its prompt)",
    "constant_length": "w_t = 1 / (sequences of the step x {max_response_tokens})",
}
_KL = {"k1": "d_t", "k2": "d_t^2 / 2", "k3": "exp(-d_t) + d_t - 1"}


def objective_formula(config: TrainConfig) -> str:
    """The loss of one optimizer step as text.

    Minimised: the sum over trainable tokens of w_t times what stands in the brackets.
    """
    algorithm = config.algorithm
    terms, where = ["loss_t"], POLICY_LOSSES[algorithm.policy_loss.kind].formula(algorithm.policy_loss)
    if algorithm.correction.kind != "none":
        where = [*where, *CORRECTIONS[algorithm.correction.kind].formula(algorithm.correction)]
    where = [*where, *_rejections(config)]
    if algorithm.kl.coef > 0:
        where = [*where, *_kl_lines(config)]
        if algorithm.kl.place == "loss":
            terms.append(f"+ {algorithm.kl.coef:g} kl_t")
    if algorithm.likelihood_coef > 0:
        terms.append(f"- {algorithm.likelihood_coef:g} logprobs_t / (w_t n) [right]")
        where = [
            *where,
            f"right: in an answer with reward >= {algorithm.likelihood_reward:g}, of which the step has n tokens",
        ]
    if algorithm.entropy_coef != 0 or algorithm.entropy_target is not None:
        terms.append(f"{'-' if algorithm.entropy_coef >= 0 else '+'} {abs(algorithm.entropy_coef):g} entropy_t")
        if algorithm.entropy_target is not None:
            where.append(
                f"entropy's weight: + {algorithm.entropy_step:g} per batch below {algorithm.entropy_target:g} nats, else - "
                f"{algorithm.entropy_step:g}, never below 0"
            )
    title = algorithm.policy_loss.kind
    if algorithm.preset:
        changed = ", with changes of yours" if _departs(config) else ""
        title += f"   (preset {algorithm.preset}{changed}: {PRESETS[algorithm.preset][0]})"
    lines = [
        f"objective: {title}",
        "",
        f"  minimise  sum_t w_t [ {' '.join(terms)} ]",
        *(f"  {line}" for line in where),
        *(f"  {line}" for line in _advantage_lines(config)),
        *(f"  {line}" for line in _teacher_lines(config)),
        f"  {_WEIGHTS[algorithm.reduction].format(max_response_tokens=config.rollout.max_response_tokens)}",
        *_ratio_lines(config),
        *_critic_lines(config),
        *support_lines(config),
        "",
        *_batch_lines(config),
    ]
    return "\n".join(lines) + "\n"


def _departs(config: TrainConfig) -> bool:
    """Is there a value that the preset would have set otherwise?"""
    now = values(config)
    return any(now.get(path) != value for path, value in flatten(preset_values(config.algorithm.preset or "")))


def _rejections(config: TrainConfig) -> list[str]:
    algorithm, lines = config.algorithm, []
    if algorithm.veto_ratio is not None:
        lines.append(
            f"loss_t = 0 in a sequence with a token of exp(old_logprobs - rollout_logprobs) < {algorithm.veto_ratio:g}"
        )
    if algorithm.opsm_delta is not None:
        lines.append(
            f"loss_t = 0 in a sequence with A < 0 and mean(old_logprobs - logprobs) > {algorithm.opsm_delta:g}"
        )
    return lines


def _kl_lines(config: TrainConfig) -> list[str]:
    kl = config.algorithm.kl
    estimate = f"{'r_t (' if kl.unbiased else ''}{_KL[kl.kind]}{')' if kl.unbiased else ''}"
    of = "old_logprobs" if kl.place == "reward" else "logprobs"
    name = "kl_t" if kl.place == "loss" else f"token_kl_t = {kl.coef:g} kl_t,  kl_t"
    lines = [f"{name} = {estimate},  d_t = {of}_t - ref_logprobs_t"]
    if kl.target is not None:
        lines.append(
            f"its coefficient follows a target of {kl.target:g} nats per token over {kl.horizon_steps} batches"
        )
    if kl.refresh_steps:
        lines.append(f"the reference becomes the policy after every {kl.refresh_steps} batches")
    return lines


def _reward_lines(config: TrainConfig) -> list[str]:
    """How named rewards are added up, as far as the options say it."""
    weights = named_weights(config.reward)
    if config.algorithm.advantage.kind == "gdpo":
        words = ", ".join(f"{weight:g} for {name}" for name, weight in weights.items())
        return [f"w_k = {words}" if weights else "w_k = 1 for each named reward"]
    return [f"R = {' + '.join(f'{weight:g} {name}' for name, weight in weights.items())}"] if weights else []


def _penalty_lines(config: TrainConfig) -> list[str]:
    penalty, limit = config.length_penalty, config.rollout.max_response_tokens
    if isinstance(penalty, SoftOverlongOptions):
        buffer = penalty.buffer_of(limit)
        taken = f"{penalty.penalty_coef:g} min(max(n - {limit - buffer}, 0), {buffer}) / {buffer}"
    elif isinstance(penalty, PerTokenPenaltyOptions):
        taken = f"{penalty.penalty_coef:g} max(n - {penalty.target_tokens}, 0)"
    else:
        return []
    apart = ", a named reward of its own" if config.algorithm.advantage.kind == "gdpo" else ""
    return [f"R = score - {taken},  n = tokens of the response{apart}"]


def _filter_lines(config: TrainConfig) -> list[str]:
    filters, lines = config.filter, []
    if filters.rollout is not None:
        lines.append(f"rollouts stay if {filters.rollout} says so")
    if filters.equal_rewards:
        lines.append("groups whose scores are all equal are dropped")
    if filters.group is not None:
        lines.append(f"groups stay if {filters.group} says so")
    if not lines:
        return []
    surplus = "waits for the next batch" if filters.surplus == "keep" else "is dropped"
    per_round = f"{config.rollout.round_size} prompts a round, at most {filters.max_rounds} rounds"
    return [f"  {'; '.join(lines)}", f"  -> sampled until the batch is full: {per_round}; what is too much {surplus}"]


def _advantage_lines(config: TrainConfig) -> list[str]:
    """What makes A_t of rewards; nothing where a teacher is listened to alone."""
    algorithm = config.algorithm
    if config.distillation.alone:
        return []
    lines = ADVANTAGES[algorithm.advantage.kind].formula(algorithm.advantage)
    whitens = ["then A is brought to mean 0 and deviation 1 over the batch's tokens"]
    return [*lines, *(whitens if algorithm.whiten_advantages else []), *_reward_lines(config), *_penalty_lines(config)]


def _teacher_lines(config: TrainConfig) -> list[str]:
    options = config.distillation
    if not options.is_on:
        return []
    later = f"sum over s >= t of {options.teacher_gamma:g}^(s - t) d_s" if options.teacher_gamma else "d_t"
    signal = f"{options.teacher_coef:g} {later}"
    lines = [
        f"A_t = {signal}; rewards are only measured"
        if options.alone
        else f"A_t += {signal}, after all that makes A_t of rewards",
        "d_t = teacher_logprobs_t - old_logprobs_t, of the student's own samples: E[-d_t] = KL(policy || teacher)",
    ]
    if options.teachers:
        others = [f"others: {options.teacher}"] if options.teacher is not None else []
        lines.append(f"teachers: {', '.join([f'{s}: {place}' for s, place in options.teachers.items()] + others)}")
    else:
        lines.append(f"teacher: {options.teacher}")
    return lines


def _ratio_lines(config: TrainConfig) -> list[str]:
    """The ratio, where the formula has one, and what old_logprobs are, where it has them."""
    algorithm = config.algorithm
    at = "" if config.rollout.temperature == 1 else f", at temperature {config.rollout.temperature:g}"
    says_ratio = POLICY_LOSSES[algorithm.policy_loss.kind].options.has_ratio or algorithm.kl.unbiased
    lines = []
    if says_ratio:
        is_fresh = not config.may_be_stale and config.rollout.from_folder is None
        samples = ", on fresh samples" if is_fresh else ""
        moves = "" if algorithm.ratio_moves else f" = 1 in value: one update per batch{samples}"
        lines.append(f"  r_t = exp(logprobs_t - old_logprobs_t){moves}")
    if algorithm.old_logprobs == "rollout":
        whose = (
            "the sampler's own" if config.rollout.from_folder is None else "as recorded when the rollouts were sampled"
        )
        lines.append(f"  old_logprobs: {whose}, rollout_logprobs{at}")
    elif says_ratio or _compares_with_old(config):
        when = "before the batch's first update" if algorithm.updates_per_batch > 1 else "before the update"
        lines.append(f"  old_logprobs: the trainer's, {when}{at}")
    elif at:
        lines.append(f"  logprobs{at}")
    return lines


def _compares_with_old(config: TrainConfig) -> bool:
    """Does something beside the ratio take old_logprobs?"""
    algorithm = config.algorithm
    kl_in_reward = algorithm.kl.coef > 0 and algorithm.kl.place == "reward"
    rejects = algorithm.opsm_delta is not None or algorithm.veto_ratio is not None
    return kl_in_reward or rejects or algorithm.correction.kind != "none" or config.distillation.is_on


def _critic_lines(config: TrainConfig) -> list[str]:
    """What the critic minimises beside the policy."""
    advantage, near = config.algorithm.advantage, config.critic.eps_clip_value
    if not isinstance(advantage, GAEOptions):
        return []
    distance = "(V_t - target_t)^2 / 2"
    if near is not None:
        distance = f"max((V_t - target_t)^2, (clip(V_t, old V_t - {near:g}, old V_t + {near:g}) - target_t)^2) / 2"
    lam, base = "", "A_t" if not advantage.whiten else "G_t"
    if advantage.lam_value is not None:
        lam, base = f" with lambda {advantage.lam_value:g}", f"the {base}"
    return [f"  critic: minimise  sum_t w_t {distance}", f"    target_t = old V_t + {base}{lam}"]


def _batch_lines(config: TrainConfig) -> list[str]:
    rollout, updates = config.rollout, config.algorithm.updates_per_batch
    sequences = rollout.prompts_per_step * rollout.group_size
    left_out = "; responses cut at the limit are left out" if config.algorithm.mask_truncated else ""
    alone = config.critic.only_first_steps
    first = f"; in the first {alone} only the critic learns" if alone else ""
    recorded = [] if rollout.from_folder is None else [f"  rollouts: recorded, from {rollout.from_folder}; off-policy"]
    return [
        *recorded,
        f"  batch: {rollout.prompts_per_step} prompts x {rollout.group_size} samples = {sequences} sequences of at most "
        f"{rollout.max_response_tokens} tokens{left_out}",
        *_filter_lines(config),
        f"  -> {updates} optimizer step{'s' if updates > 1 else ''} of {sequences // updates} sequences"
        f" -> {config.num_optimizer_steps} optimizer steps in {config.run.num_steps} batches{first}",
        *_off_policy_lines(config),
        f"  passes: {'; '.join(_passes(config))}",
    ]


def _off_policy_lines(config: TrainConfig) -> list[str]:
    """How many optimizer steps there may be between sampling and learning."""
    rollout, updates = config.rollout, config.algorithm.updates_per_batch
    if rollout.max_off_policy_steps == 0:
        return [f"  -> the last update of a batch is {_steps(updates - 1)} off-policy"]
    ahead = config.batches_ahead
    first = rollout.max_off_policy_steps if rollout.streaming else ahead * updates
    batches = f"{ahead} batch{'' if ahead == 1 else 'es'} ahead"
    how = (
        f"up to {batches}, a step starts with the groups that are complete, and samples go on over weight updates"
        if rollout.streaming
        else f"{batches}, each batch by the weights of one step"
    )
    masked = ["  -> tokens of older weights than their response's last ones are left out of the loss"]
    return [
        f"  -> sampled {how}",
        f"  -> the first update of a batch is up to {_steps(first)} off-policy, the last up to {_steps(first + updates - 1)}",
        *(masked if rollout.mask_older_tokens else []),
    ]


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'}"


def _passes(config: TrainConfig) -> list[str]:
    """The forward passes over a batch beside those that learn, and why there is none where there is none."""
    algorithm, updates = config.algorithm, config.algorithm.updates_per_batch
    kl_in_reward = algorithm.kl.coef > 0 and algorithm.kl.place == "reward"
    selects = POLICY_LOSSES[algorithm.policy_loss.kind].select is not None
    if algorithm.old_logprobs == "rollout":
        old = "none, the sampler's are taken"
    elif selects or kl_in_reward or config.distillation.is_on:
        old = "of the whole batch"
    elif updates > 1:
        old = f"of {updates - 1} of {updates} parts, the first update takes its own"
    else:
        old = "none, the only update takes its own"
    reference = "the model without its adapters" if config.lora.is_on else "a frozen copy of the model"
    return [
        f"old_logprobs {old}",
        f"reference {reference if algorithm.kl.coef > 0 else 'none'}",
        f"values {'of the critic' if config.has_critic else 'none'}",
        *(["teacher of the whole batch"] if config.distillation.is_on else []),
    ]
