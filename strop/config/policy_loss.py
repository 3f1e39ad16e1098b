"""Options of the policy loss, one class per variant.

The fields of a variant (all but `kind`) are exactly the keyword-only arguments of the function in `strop.ops` that it
is bound to; `strop.algorithms` refuses to import otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop.config.base import Derived, Options, Problem


class PolicyLossBase(Options):
    """What all variants say of themselves."""

    # Options that act only where the ratio can differ from 1, and, of these, caps on a weight: below 1 they cut a ratio of 1.
    acts_through_ratio: ClassVar[tuple[str, ...]] = ()
    caps_a_weight: ClassVar[str | None] = None
    has_ratio: ClassVar[bool] = True
    # True where the loss is one of the whole sequence, and its advantage too.
    needs_one_advantage: ClassVar[bool] = False

    def idle_at_ratio_1(self) -> list[str]:
        """Options that cannot act where every ratio is 1, as they are set."""
        return [name for name in self.acts_through_ratio if name != self.caps_a_weight or vars(self)[name] >= 1]


def _as_low(eps_clip_high: float | None, eps_clip: float) -> Iterator[Derived]:
    if eps_clip_high is None:
        yield Derived("eps_clip_high", eps_clip, "eps_clip")


class PPOClipOptions(PolicyLossBase):
    """PPO's clipped surrogate, with dual clip."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high", "eps_clip_c")
    kind: Literal["ppo_clip"] = "ppo_clip"
    eps_clip: float = Field(default=0.2, ge=0, lt=1, description="Distance of the ratio's lower bound from 1.")
    eps_clip_high: float | None = Field(
        default=None, ge=0, description="Distance of the ratio's upper bound from 1; none means eps_clip."
    )
    eps_clip_c: float | None = Field(
        default=None,
        gt=1,
        description="Dual clip: cap on the ratio where the advantage is negative; none means no cap.",
    )

    def derived(self) -> Iterator[Derived]:
        yield from _as_low(self.eps_clip_high, self.eps_clip)

    def problems(self) -> Iterator[Problem]:
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        if self.eps_clip_c is not None and self.eps_clip_c <= 1 + high:
            yield Problem(
                "eps_clip_c",
                f"must be above 1 + eps_clip_high = {1 + high:g}, got {self.eps_clip_c:g}. "
                "A cap inside the band would cut tokens that the band lets through.",
            )


class CISPOOptions(PolicyLossBase):
    """CISPO: the importance weight is clipped under a stop-gradient; every token keeps its gradient."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high")
    why_not: ClassVar[dict[str, str]] = {"eps_clip_c": "cispo has no lower branch to cap"}
    kind: Literal["cispo"] = "cispo"
    eps_clip: float = Field(
        default=1.0, ge=0, le=1, description="Distance of the weight's lower bound from 1; 1.0 means no lower bound."
    )
    eps_clip_high: float = Field(default=4.0, ge=0, description="Distance of the weight's upper bound from 1.")

    def warnings(self) -> Iterator[str]:
        if self.eps_clip < 1:
            yield (
                f"CISPO with eps_clip = {self.eps_clip:g} keeps a lower bound of {1 - self.eps_clip:g} on the weight. "
                "The canonical form has none: eps_clip = 1.0, eps_clip_high = 4.0."
            )


class GSPOOptions(PolicyLossBase):
    """GSPO: PPO's surrogate on the geometric mean of a sequence's ratios."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high")
    needs_one_advantage: ClassVar[bool] = True
    kind: Literal["gspo"] = "gspo"
    eps_clip: float = Field(
        default=3e-4, ge=0, lt=1, description="Distance of the sequence ratio's lower bound from 1."
    )
    eps_clip_high: float = Field(default=4e-4, ge=0, description="Distance of the sequence ratio's upper bound from 1.")


class GSPOTokenOptions(PolicyLossBase):
    """GSPO-token: the sequence's ratio in value, each token's own gradient."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high")
    kind: Literal["gspo_token"] = "gspo_token"
    eps_clip: float = Field(
        default=3e-4, ge=0, lt=1, description="Distance of the sequence ratio's lower bound from 1."
    )
    eps_clip_high: float = Field(default=4e-4, ge=0, description="Distance of the sequence ratio's upper bound from 1.")


class GMPOOptions(PolicyLossBase):
    """GMPO: the geometric mean of clipped token ratios."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high")
    needs_one_advantage: ClassVar[bool] = True
    kind: Literal["gmpo"] = "gmpo"
    eps_clip: float = Field(default=0.4, ge=0, description="Distance of a log-ratio's lower bound from 0.")
    eps_clip_high: float = Field(default=0.4, ge=0, description="Distance of a log-ratio's upper bound from 0.")


class SAPOOptions(PolicyLossBase):
    """SAPO: a smooth gate in place of a clip."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("tau_pos", "tau_neg")
    kind: Literal["sapo"] = "sapo"
    tau_pos: float = Field(default=1.0, gt=0, description="How fast the gate closes where the advantage is positive.")
    tau_neg: float = Field(default=1.05, gt=0, description="How fast the gate closes elsewhere.")


class ReinforceOptions(PolicyLossBase):
    """REINFORCE, without a ratio."""

    has_ratio: ClassVar[bool] = False
    kind: Literal["reinforce"] = "reinforce"


class ImportanceSamplingOptions(PolicyLossBase):
    """The unclipped surrogate."""

    kind: Literal["importance_sampling"] = "importance_sampling"


class DPPOOptions(PolicyLossBase):
    """DPPO: a trust region in probability, not in the ratio."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("divergence", "max_divergence", "max_divergence_high", "max_ratio")
    caps_a_weight: ClassVar[str | None] = "max_ratio"
    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = Field(
        default="tv", description="Total variation or KL of the token's probability."
    )
    max_divergence: float | None = Field(
        default=None,
        ge=0,
        description="Bound where the probability fell; none means 0.15 in probability (tv) or 0.05 in nats (kl).",
    )
    max_divergence_high: float | None = Field(
        default=None, ge=0, description="Bound where the probability rose; none means max_divergence."
    )
    max_ratio: float = Field(default=20.0, gt=0, description="Where the importance weight is cut.")

    def derived(self) -> Iterator[Derived]:
        low = self.max_divergence
        if low is None:
            low = {"tv": 0.15, "kl": 0.05}[self.divergence]
            yield Derived("max_divergence", low, f"divergence = {self.divergence}")
        if self.max_divergence_high is None:
            yield Derived("max_divergence_high", low, "max_divergence")

    def problems(self) -> Iterator[Problem]:
        bounds = {"max_divergence": self.max_divergence, "max_divergence_high": self.max_divergence_high}
        for name, value in bounds.items():
            if self.divergence == "tv" and value is not None and value > 1:
                yield Problem(
                    name, f"must be at most 1 with divergence = tv, got {value:g}: probabilities differ by less."
                )


class ClipCovOptions(PolicyLossBase):
    """Clip-Cov: PPO's surrogate without the few tokens that lower entropy most."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high")
    kind: Literal["clip_cov"] = "clip_cov"
    eps_clip: float = Field(default=1.0, ge=0, le=1, description="Distance of the ratio's lower bound from 1.")
    eps_clip_high: float | None = Field(
        default=1.0, ge=0, description="Distance of the ratio's upper bound from 1; none means eps_clip."
    )
    cov_fraction: float = Field(
        default=2e-4, gt=0, le=1, description="Share of a step's tokens that is left out, at least one."
    )
    cov_low: float = Field(default=1.0, description="Lower bound of the covariances that may be left out.")
    cov_high: float = Field(default=5.0, description="Upper bound of the covariances that may be left out.")

    def derived(self) -> Iterator[Derived]:
        yield from _as_low(self.eps_clip_high, self.eps_clip)

    def problems(self) -> Iterator[Problem]:
        if self.cov_low > self.cov_high:
            yield Problem("cov_low", f"must be at most cov_high, got {self.cov_low:g} and {self.cov_high:g}.")


class KLCovOptions(PolicyLossBase):
    """KL-Cov: the tokens that lower entropy most are held where they were."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("cov_fraction", "cov_kl_coef")
    kind: Literal["kl_cov"] = "kl_cov"
    cov_fraction: float = Field(
        default=2e-4,
        gt=0,
        le=1,
        description="Share of a step's tokens that is held, at least one; 2e-3 for small models.",
    )
    cov_kl_coef: float = Field(default=1.0, ge=1e-12, description="How strongly they are held.")


class TOPROptions(PolicyLossBase):
    """TOPR: good answers are imitated, bad ones pushed down by their truncated importance weight."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("max_ratio",)
    caps_a_weight: ClassVar[str | None] = "max_ratio"
    needs_one_advantage: ClassVar[bool] = True
    kind: Literal["topr"] = "topr"
    max_ratio: float = Field(default=1.0, gt=0, description="Where the weight of a bad answer is cut.")


class ASPOOptions(PolicyLossBase):
    """ASPO: the importance weight of good tokens is turned over."""

    acts_through_ratio: ClassVar[tuple[str, ...]] = ("eps_clip", "eps_clip_high", "max_weight")
    caps_a_weight: ClassVar[str | None] = "max_weight"
    kind: Literal["aspo"] = "aspo"
    eps_clip: float = Field(default=0.2, ge=0, lt=1, description="Distance of PPO's lower bound from 1.")
    eps_clip_high: float = Field(default=0.28, ge=0, description="Distance of PPO's upper bound from 1.")
    max_weight: float = Field(
        default=3.0,
        gt=0,
        description="Where the weight of a good token is cut, its gradient kept; the paper gives no value, 3.0 is strop's.",
    )


PolicyLossOptions = Annotated[
    PPOClipOptions
    | CISPOOptions
    | GSPOOptions
    | GSPOTokenOptions
    | GMPOOptions
    | SAPOOptions
    | ReinforceOptions
    | ImportanceSamplingOptions
    | DPPOOptions
    | ClipCovOptions
    | KLCovOptions
    | TOPROptions
    | ASPOOptions,
    Field(discriminator="kind"),
]
