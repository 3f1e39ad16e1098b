"""Rules for slime's flags of on-policy distillation (OPD)."""

from __future__ import annotations

from urllib.parse import urlsplit

from strop.compat.import_slime.draft import Draft, Given

# slime's own reward function of OPD: it asks the teacher, and every reward is 0.
_TEACHER_AS_REWARD = "on_policy_distillation.reward_func"
_OTHERS = ("--opd-type", "--opd-kl-coef", "--opd-teacher-load", "--opd-teacher-ckpt-step")


def learns_from_a_teacher_alone(given: Given) -> bool:
    """True where slime's reward is its function that asks the teacher."""
    return given.has("--use-opd") and given.text("--custom-rm-path").endswith(_TEACHER_AS_REWARD)


def distillation(given: Given, draft: Draft) -> None:
    """--use-opd with its teacher, in this process or behind an address."""
    kind = given.text("--opd-type")
    if not given.has("--use-opd"):
        for flag in _OTHERS:
            if given.has(flag):
                draft.without(flag, "acts with --use-opd alone, in slime too.")
        return
    has_teacher = _teacher(given, draft, kind)
    if given.has("--opd-kl-coef") and has_teacher:
        draft.set("distillation.teacher_coef", given.text("--opd-kl-coef"), "--opd-kl-coef")
    elif given.has("--opd-kl-coef"):
        draft.without("--opd-kl-coef", "acts with a teacher alone.")
    if learns_from_a_teacher_alone(given) and has_teacher:
        draft.set("distillation.alone", True, "--custom-rm-path", words="its rewards are all 0")
    if given.has("--opd-teacher-ckpt-step"):
        draft.without("--opd-teacher-ckpt-step", "strop's teacher is a Hugging Face folder, which has no steps.")


def _teacher(given: Given, draft: Draft, kind: str) -> bool:
    """Where the teacher is; False where strop has no such teacher."""
    flags = ("--use-opd", *(("--opd-type",) if given.has("--opd-type") else ()))
    load = ("--opd-teacher-load",) if given.has("--opd-teacher-load") else ()
    if kind == "megatron" and given.text("--opd-teacher-load"):
        words = "the folder must be a Hugging Face one; slime's is Megatron's"
        draft.set("distillation.teacher", given.text("--opd-teacher-load"), *flags, *load, words=words)
        return True
    if kind == "sglang":
        parts = urlsplit(given.text("--rm-url"))
        place = f"{parts.scheme}://{parts.netloc}" if parts.netloc else "http://127.0.0.1:8000"
        words = "a vLLM server must answer there; slime asks SGLang's"
        draft.set("distillation.teacher", place, *flags, words=words)
        for flag in load:
            draft.without(flag, "slime refuses it with --opd-type sglang.")
        return True
    reason = {
        "self": "strop has no teacher that is shown the solution (OPSD).",
        "megatron": "needs --opd-teacher-load, in slime too.",
    }.get(kind, "needs --opd-type sglang or megatron, in slime too.")
    for flag in (*flags, *load):
        draft.without(flag, reason)
    return False


RULES = {distillation: "--use-opd --opd-type --opd-kl-coef --opd-teacher-load --opd-teacher-ckpt-step"}
