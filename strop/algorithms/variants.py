"""All variants that a config can name. To add one: a function in `strop.ops`, an options class, a line here."""

from __future__ import annotations

from typing import Any

from strop.algorithms.binding import Binding, bind
from strop.config import advantage as advantages
from strop.config import algorithm as corrections
from strop.config import policy_loss as losses
from strop.ops import advantages as advantage_ops
from strop.ops import correction as correction_ops
from strop.ops import policy_loss as loss_ops


def _band(low: float, high: float) -> str:
    return f"{max(0.0, 1 - low):g}, {1 + high:g}"


def _outside(o: Any, ratio: str = "r") -> str:
    """Where PPO's clipped branch decides."""
    high = o.eps_clip if o.eps_clip_high is None else o.eps_clip_high
    return f"A > 0 and {ratio} > {1 + high:g} or A < 0 and {ratio} < {1 - o.eps_clip:g}"


def _ppo_outside(o: losses.PPOClipOptions) -> str:
    return _outside(o) + ("" if o.eps_clip_c is None else f" or A < 0 and r > {o.eps_clip_c:g}")


def _ppo(o: losses.PPOClipOptions) -> list[str]:
    high = o.eps_clip if o.eps_clip_high is None else o.eps_clip_high
    lines = [f"loss_t = max(-A_t r_t, -A_t clip(r_t, {_band(o.eps_clip, high)}))"]
    if o.eps_clip_c is not None:
        lines.append(f"loss_t = min(loss_t, {o.eps_clip_c:g} |A_t|)   where A_t < 0   (dual clip)")
    return lines


def _cispo(o: losses.CISPOOptions) -> list[str]:
    return [f"loss_t = -stop_gradient(clip(r_t, {_band(o.eps_clip, o.eps_clip_high)})) A_t logprobs_t"]


def _gspo(o: losses.GSPOOptions | losses.GSPOTokenOptions) -> list[str]:
    own = ", each token with its own gradient" if o.kind == "gspo_token" else ""
    return [
        f"loss_t = max(-A_t s, -A_t clip(s, {_band(o.eps_clip, o.eps_clip_high)}))",
        f"s = exp(mean of log r_t over the sequence){own}",
    ]


def _gmpo(o: losses.GMPOOptions) -> list[str]:
    return [
        "loss_t = -A exp(mean over the sequence of c_t)",
        f"c_t = min(log r_t, {o.eps_clip_high:g}) where A > 0, max(log r_t, {-o.eps_clip:g}) where A < 0",
    ]


def _gmpo_outside(o: losses.GMPOOptions) -> str:
    return f"A > 0 and log_r > {o.eps_clip_high:g} or A < 0 and log_r < {-o.eps_clip:g}"


def _sapo(o: losses.SAPOOptions) -> list[str]:
    return [
        "loss_t = -A_t (4 / tau) sigmoid(tau (r_t - 1))",
        f"tau = {o.tau_pos:g} where A_t > 0, else {o.tau_neg:g}; less gradient the farther r_t is from 1",
    ]


def _dppo_outside(o: losses.DPPOOptions) -> str:
    low = loss_ops.DEFAULT_MAX_DIVERGENCE[o.divergence] if o.max_divergence is None else o.max_divergence
    high = low if o.max_divergence_high is None else o.max_divergence_high
    return f"A > 0 and p > q and D > {high:g} or A < 0 and p < q and D > {low:g}"


def _dppo(o: losses.DPPOOptions) -> list[str]:
    distance = "|p - q|" if o.divergence == "tv" else "KL(Bernoulli(q) || Bernoulli(p))"
    return [
        f"loss_t = -keep stop_gradient(min(r_t, {o.max_ratio:g})) A_t logprobs_t",
        f"D_t = {distance},  p = exp(logprobs_t), q = exp(old_logprobs_t)",
        f"keep = not ({_dppo_outside(o)})",
    ]


def _clip_cov(o: losses.ClipCovOptions) -> list[str]:
    high = o.eps_clip if o.eps_clip_high is None else o.eps_clip_high
    return [
        f"loss_t = max(-A_t r_t, -A_t clip(r_t, {_band(o.eps_clip, high)})), 0 for the selected tokens",
        f"selected: the {o.cov_fraction:g} of the step's tokens (at least 1) of the largest covariance of A and old_logprobs",
        f"within [{o.cov_low:g}, {o.cov_high:g}]",
    ]


def _kl_cov(o: losses.KLCovOptions) -> list[str]:
    return [
        f"loss_t = -A_t r_t + {o.cov_kl_coef:g} |log r_t| for the selected tokens, -A_t r_t for the others",
        f"selected: the {o.cov_fraction:g} of the step's tokens (at least 1) of the largest covariance of A and old_logprobs",
    ]


def _topr(o: losses.TOPROptions) -> list[str]:
    return [
        f"loss_t = -A_t logprobs_t where A_t >= 0, -stop_gradient(min(R, {o.max_ratio:g})) A_t logprobs_t elsewhere",
        "R = exp(sum of log r_t over the sequence)",
    ]


def _aspo(o: losses.ASPOOptions) -> list[str]:
    return [
        "loss_t = -keep stop_gradient(w_t) A_t logprobs_t",
        f"w_t = min(1 / r_t, {o.max_weight:g}) where A_t > 0, else r_t",
        f"keep = not ({_outside(o)})",
    ]


POLICY_LOSSES: dict[str, Binding] = {
    "ppo_clip": bind(losses.PPOClipOptions, loss_ops.ppo_clip, _ppo, no_gradient_where=_ppo_outside),
    "cispo": bind(losses.CISPOOptions, loss_ops.cispo, _cispo),
    "gspo": bind(losses.GSPOOptions, loss_ops.gspo, _gspo, no_gradient_where=lambda o: _outside(o, "s")),
    "gspo_token": bind(
        losses.GSPOTokenOptions, loss_ops.gspo_token, _gspo, no_gradient_where=lambda o: _outside(o, "s")
    ),
    "gmpo": bind(losses.GMPOOptions, loss_ops.gmpo, _gmpo, no_gradient_where=_gmpo_outside),
    "sapo": bind(losses.SAPOOptions, loss_ops.sapo, _sapo),
    "reinforce": bind(losses.ReinforceOptions, loss_ops.reinforce, lambda o: ["loss_t = -A_t logprobs_t"]),
    "importance_sampling": bind(
        losses.ImportanceSamplingOptions, loss_ops.importance_sampling, lambda o: ["loss_t = -A_t r_t"]
    ),
    "dppo": bind(losses.DPPOOptions, loss_ops.dppo, _dppo, no_gradient_where=_dppo_outside),
    "clip_cov": bind(
        losses.ClipCovOptions,
        loss_ops.clip_cov,
        _clip_cov,
        loss_ops.covariances_in_band,
        lambda o: f"{_outside(o)} or selected",
    ),
    "kl_cov": bind(losses.KLCovOptions, loss_ops.kl_cov, _kl_cov, loss_ops.largest_covariances),
    "topr": bind(losses.TOPROptions, loss_ops.topr, _topr),
    "aspo": bind(losses.ASPOOptions, loss_ops.aspo, _aspo, no_gradient_where=_outside),
}


_EARNED = "R_s: what token s earned; a number for the whole response counts at its last token"


def _group(o: advantages.GroupAdvantageOptions) -> list[str]:
    if o.normalize_std:
        return [f"A_t = (R - mean_group(R)) / (std_group(R) + {o.std_eps:g})"]
    return ["A_t = R - mean_group(R)"]


def _gae(o: advantages.GAEOptions) -> list[str]:
    adaptive = o.length_adaptive_alpha is not None
    gamma = "" if o.gamma == 1 else f"{o.gamma:g} "
    lam = "lambda " if adaptive else "" if o.lam == 1 else f"{o.lam:g} "
    between = "x " if gamma and lam else ""
    sums = [f"A_t = delta_t + {gamma}{between}{lam}A_next"]
    if o.whiten:
        sums = [f"A_t = whiten(G_t),  G_t = delta_t + {gamma}{between}{lam}G_next"]
    if adaptive:
        sums.append(f"lambda = max(0, 1 - 1 / ({o.length_adaptive_alpha:g} x response tokens))")
    return [
        *sums,
        f"delta_t = earned_t + {gamma}V_next - V_t,  V: the critic's before the batch's first update",
        "earned_t = R_t - token_kl_t;  next: the next token that the policy wrote, 0 after the last",
        "R_t: what token t earned; a number for the whole response counts at its last token",
    ]


def _process(o: advantages.ProcessAdvantageOptions) -> list[str]:
    mean, over = "mean_group(steps)", f" / (std_group(steps) + {o.std_eps:g})" if o.normalize_std else ""
    return [f"A_t = sum over steps s >= t of {'(' if over else ''}R_s - {mean}{')' if over else ''}{over}", _EARNED]


def _pass_at_k(o: advantages.PassAtKOptions) -> list[str]:
    return [f"A_t: of a rollout within all sets of {o.k} of its group; it succeeds if R >= {o.success_reward:g}"]


ADVANTAGES: dict[str, Binding] = {
    "group": bind(advantages.GroupAdvantageOptions, advantage_ops.group_advantages, _group),
    "rloo": bind(advantages.RLOOOptions, advantage_ops.rloo, lambda o: ["A_t = R - mean of the others of its group"]),
    "opo": bind(advantages.OPOOptions, advantage_ops.opo, lambda o: ["A_t = R - length-weighted mean_group(R)"]),
    "maxrl": bind(
        advantages.MaxRLOptions,
        advantage_ops.maxrl,
        lambda o: [f"A_t = (R - mean_group(R)) / (mean_group(R) + {o.mean_eps:g})"],
    ),
    "pass_at_k": bind(advantages.PassAtKOptions, advantage_ops.pass_at_k, _pass_at_k),
    "gdpo": bind(
        advantages.GDPOOptions,
        advantage_ops.gdpo,
        lambda o: [f"A_t = whiten(sum_k w_k (R_k - mean_group(R_k)) / (std_group(R_k) + {o.std_eps:g}))"],
    ),
    "process": bind(advantages.ProcessAdvantageOptions, advantage_ops.process_advantages, _process),
    "reinforce_plus_plus": bind(
        advantages.ReinforcePlusPlusOptions,
        advantage_ops.reinforce_plus_plus,
        lambda o: [f"A_t = whiten(sum over s >= t of {o.gamma:g}^(s - t) (R_s - token_kl_s))", _EARNED],
    ),
    "reinforce_plus_plus_baseline": bind(
        advantages.ReinforcePlusPlusBaselineOptions,
        advantage_ops.reinforce_plus_plus_baseline,
        lambda o: ["A_t = whiten(R - mean_group(R) - token_kl_t)"],
    ),
    "gae": bind(advantages.GAEOptions, advantage_ops.gae, _gae),
}

_LEVELS = {"token": "", "sequence_sum": ", summed over the sequence", "sequence_mean": ", averaged over the sequence"}


def _corrected(o: Any) -> list[str]:
    outside = "held in" if o.kind == "truncate" else "0 outside"
    return [
        f"loss_t is multiplied by exp(old_logprobs_t - rollout_logprobs_t{_LEVELS[o.level]}), {outside} "
        f"[{o.min_ratio:g}, {o.max_ratio:g}]"
    ]


CORRECTIONS: dict[str, Binding] = {
    "truncate": bind(corrections.TruncateOptions, correction_ops.truncate, _corrected),
    "mask": bind(corrections.MaskOptions, correction_ops.mask, _corrected),
}
