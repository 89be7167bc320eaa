"""The preference losses by name: what each one reads, and the paper that defines it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreferenceFacts:
    """One row of the catalogue."""

    paper: str
    beta: float | None = 0.1  # the usual value; None: the loss has no beta
    fields: frozenset[str] = frozenset()  # configuration fields that this loss alone, or few, read
    needs_reference: bool = True
    averaged: bool = False  # log-probabilities per token instead of per sequence
    paired: bool = True  # chosen and rejected completions of one prompt
    couples: bool = False  # a pair's loss depends on the other pairs of the step
    takes_margins: bool = True


_SMOOTHED = frozenset({"label_smoothing"})

PREFERENCE_LOSSES: dict[str, PreferenceFacts] = {
    "sigmoid": PreferenceFacts("DPO, arXiv 2305.18290, eq. 7"),
    "cdpo": PreferenceFacts("Mitchell 2023, A note on DPO with noisy preferences", fields=_SMOOTHED),
    "robust": PreferenceFacts("Provably robust DPO, arXiv 2403.00409", fields=_SMOOTHED),
    "ipo": PreferenceFacts("IPO, arXiv 2310.12036, eq. 17, on log-ratios per token", averaged=True),
    "hinge": PreferenceFacts("RSO, arXiv 2309.06657: SLiC's hinge on normalised likelihoods"),
    "aot": PreferenceFacts(
        "AOT, arXiv 2406.05882, paired", fields=_SMOOTHED, couples=True, takes_margins=False
    ),
    "aot_unpaired": PreferenceFacts(
        "AOT, arXiv 2406.05882, unpaired", fields=_SMOOTHED, couples=True, takes_margins=False
    ),
    "kto": PreferenceFacts(
        "KTO, arXiv 2402.01306, section 4",
        fields=frozenset({"desirable_weight", "undesirable_weight"}),
        paired=False,
        takes_margins=False,
    ),
    "simpo": PreferenceFacts(
        "SimPO, arXiv 2405.14734, eq. 6",
        beta=2.0,
        fields=_SMOOTHED | {"gamma"},
        needs_reference=False,
        averaged=True,
    ),
    "orpo": PreferenceFacts(
        "ORPO, arXiv 2403.07691, eq. 6 and 7; beta is its λ", needs_reference=False, averaged=True
    ),
    "cpo": PreferenceFacts(
        "CPO, arXiv 2401.08417, eq. 3", fields=_SMOOTHED | {"cpo_alpha"}, needs_reference=False
    ),
    "sft": PreferenceFacts(
        "likelihood of the chosen completions, as in TRL; a term beside another loss",
        beta=None,
        needs_reference=False,
        takes_margins=False,
    ),
}
