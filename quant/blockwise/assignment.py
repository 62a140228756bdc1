"""Which linears a quantize step changes, and how each is treated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...models.structure.open_model import LinearFacts, OpenModel
from ...system.errors import Problem, nearest_name
from ..rounding import METHODS, Method
from ..scheme import Scheme, resolve
from ..scheme_names import NESTED
from ..settings.quantize import PostTrainingQuantize

HEAD = "lm_head"


@dataclass(frozen=True)
class Treatment:
    """How one linear is treated.

    Attributes:
        scheme: what it is stored as.
        rounding: the rounding method's name.
        options: its options.
    """

    scheme: Scheme
    rounding: str
    options: Any

    @property
    def method(self) -> Method:
        return METHODS[self.rounding]

    @property
    def reads_inputs(self) -> list[str]:
        """Its parts that need the linear's inputs on a calibration text."""
        rounding = [f"rounding {self.rounding}"] if self.options.reads_inputs else []
        return [*rounding, *([f"{self.scheme.label}'s fixed input scales"] if self.scheme.reads_inputs else [])]


class Assignment:
    """A step's settings, applied to a model.

    Args:
        settings: the recipe's section.
        where: how messages name this step.
    """

    def __init__(self, settings: PostTrainingQuantize, where: str) -> None:
        self._settings = settings
        self._where = where
        self.usual = Treatment(
            resolve(settings.scheme, settings.group_size, settings.inputs),
            settings.rounding.method,
            settings.rounding.settled(),
        )
        self._special = [
            (
                override.targets,
                Treatment(
                    self.usual.scheme
                    if override.scheme is None
                    else resolve(override.scheme, override.group_size, override.inputs),
                    (override.rounding or settings.rounding).method,
                    (override.rounding or settings.rounding).settled(),
                ),
            )
            for override in settings.overrides
        ]

    def of(self, model: OpenModel) -> dict[str, Treatment]:
        """The treatment of each linear that ``targets`` matches and ``ignore`` does not, by name."""
        return {
            facts.name: self._treatment(facts, model)
            for facts in model.linears.values()
            if named(facts, self._settings.targets, model) and not named(facts, self._settings.ignore, model)
        }

    def with_fixed_scheme(self, model: OpenModel) -> set[str]:
        """The linears whose override, the last one that matches, assigns a scheme."""
        found = set()
        for name in self.of(model):
            matching = [each for each in self._settings.overrides if named(model.linears[name], each.targets, model)]
            if matching and matching[-1].scheme is not None:
                found.add(name)
        return found

    def problems(self, model: OpenModel) -> list[Problem]:
        """Everything that prevents these settings for this model."""
        chosen = self.of(model)
        facts = [model.linears[name] for name in chosen]
        problems = self._pattern_problems(model)
        nothing = self._settings.kv_cache is None and self._settings.embeddings is None
        if not chosen and not problems and nothing:
            problems.append(Problem(f"{self._where}.targets", "everything is ignored, so nothing would be quantized"))
        problems += self._shape_problems(chosen, model)
        problems += self._shared_problems(chosen, model)
        problems += self._expert_problems(chosen, model)
        problems += self._type_problems(chosen, model)
        strange = sorted({fact.kind for fact in facts if fact.kind != "Linear"})
        if strange:
            problems.append(
                Problem(
                    f"{self._where}.targets",
                    f"this model's weights are {strange[0]} modules, which transformers does not load from"
                    f" compressed-tensors checkpoints; {model.architecture} cannot be quantized yet",
                )
            )
        odd = [name for name, t in chosen.items() if model.linears[name].columns % t.options.columns_together]
        if odd:
            problems.append(
                Problem(
                    f"{self._where}.rounding",
                    f"{odd[0]} and {len(odd) - 1} more: {model.linears[odd[0]].columns} input columns do not divide into groups"
                    f" of {chosen[odd[0]].options.columns_together}; choose another pattern, or add these layers to ignore",
                )
            )
        unfit = [n for n, t in chosen.items() if t.rounding == "nested" and t.scheme.name not in NESTED]
        if unfit:
            problems.append(
                Problem(
                    f"{self._where}.rounding",
                    f"rounding nested is for scheme W4in8 or W8A16, and {unfit[0]} and {len(unfit) - 1} more are stored as"
                    f" {chosen[unfit[0]].scheme.label}; give them another rounding by an override, or another scheme",
                )
            )
        ungrouped = [
            name for name, t in chosen.items() if t.options.groups_wanted and t.scheme.args.strategy != "group"
        ]
        if ungrouped:
            problems.append(
                Problem(
                    f"{self._where}.rounding.refit_groups",
                    f"{chosen[ungrouped[0]].scheme.label} ({ungrouped[0]}) has no groups to refit; remove the option",
                )
            )
        together = [treatment.options for treatment in chosen.values() if treatment.method.by_block]
        if any(options != together[0] for options in together):
            why = (
                "a rounding that learns whole blocks has the same options in all of them; remove those of the override"
            )
            problems.append(Problem(f"{self._where}.overrides", why))
        guard = self._settings.guard
        if guard is not None and guard.otherwise == "fallback":
            if together:
                why = "a rounding that learns whole blocks does not round single layers again; set guard.otherwise to warn or fail"
                problems.append(Problem(f"{self._where}.guard.otherwise", why))
            if guard.fallback not in NESTED and any(t.method is METHODS["nested"] for t in chosen.values()):
                why = f"rounding nested is for scheme W4in8 or W8A16, not for {guard.fallback}; use W8A16, or another rounding"
                problems.append(Problem(f"{self._where}.guard.fallback", why))
            other = {name: replace(treatment, scheme=resolve(guard.fallback)) for name, treatment in chosen.items()}
            problems += [
                Problem(f"{self._where}.guard.fallback", problem.what)
                for problem in self._shape_problems(other, model) + self._type_problems(other, model)
            ]
        return problems

    def _treatment(self, facts: LinearFacts, model: OpenModel) -> Treatment:
        for patterns, treatment in reversed(self._special):
            if named(facts, patterns, model):
                return treatment
        return self.usual

    def _pattern_problems(self, model: OpenModel) -> list[Problem]:
        everything = list(model.linears.values())
        fields = [("targets", self._settings.targets), ("ignore", self._settings.ignore)]
        fields += [(f"overrides.{i}.targets", patterns) for i, (patterns, _) in enumerate(self._special)]
        problems = []
        for field, patterns in fields:
            for pattern in patterns:
                if field == "ignore" and _matches_other(pattern, model):
                    continue
                if not any(named(facts, [pattern], model) for facts in everything):
                    hint = nearest_name(pattern, [facts.name for facts in everything])
                    problems.append(
                        Problem(f"{self._where}.{field}", f"{pattern!r} matches no linear of the model{hint}")
                    )
        return problems

    def _shape_problems(self, chosen: dict[str, Treatment], model: OpenModel) -> list[Problem]:
        by_sentence: dict[tuple[str, str], list[str]] = {}
        for name, treatment in chosen.items():
            scheme, facts = treatment.scheme, model.linears[name]
            sentence = scheme.shape_problem(facts.rows, facts.columns)
            if sentence:
                field = "group_size" if scheme.accepts_group_size else "scheme"
                by_sentence.setdefault((field, sentence), []).append(name)
        return [
            Problem(
                f"{self._where}.{field}",
                f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {sentence},"
                " or add these layers to ignore",
            )
            for (field, sentence), names in by_sentence.items()
        ]

    def _shared_problems(self, chosen: dict[str, Treatment], model: OpenModel) -> list[Problem]:
        """Servers fuse linears that read the same input, so they must be stored alike."""
        for block in model.anatomy.blocks:
            for phase in block.phases():
                schemes: dict[str, str] = {}
                for group in phase:
                    for linear in group.linears:
                        name = f"{block.name}.{linear}"
                        if name in chosen:
                            schemes.setdefault(chosen[name].scheme.label, name)
                if len(schemes) > 1:
                    first, second = list(schemes.values())[:2]
                    return [
                        Problem(
                            f"{self._where}.overrides",
                            f"{first} and {second} read the same input, and servers fuse such linears;"
                            " give them the same scheme",
                        )
                    ]
        return []

    def _expert_problems(self, chosen: dict[str, Treatment], model: OpenModel) -> list[Problem]:
        """transformers fuses a block's experts as it loads them, and restores them only if all are quantized."""
        problems = []
        experts = [facts.name for facts in model.linears.values() if facts.is_expert]
        left = [name for name in experts if name not in chosen]
        if left:
            problems.append(
                Problem(
                    f"{self._where}.ignore",
                    f"leaves the expert {left[0]} unquantized; transformers reloads a quantized mixture of experts only if"
                    " all of its experts are quantized, so targets and ignore must not single one out",
                )
            )
        return problems

    def _type_problems(self, chosen: dict[str, Treatment], model: OpenModel) -> list[Problem]:
        dtype = str(model.dtype).removeprefix("torch.")
        if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return [Problem("model", f"its weights are {dtype}; convert it to bfloat16, float16 or float32")]
        if model.dtype == torch.bfloat16:
            return []
        for scheme in {treatment.scheme.name: treatment.scheme for treatment in chosen.values()}.values():
            if scheme.args.num_bits == 4 and scheme.args.type == "float":
                return [
                    Problem(
                        f"{self._where}.scheme",
                        f"{scheme.name} always reloads as bfloat16, and this model is {dtype};"
                        " convert the model to bfloat16 first or use W4A16",
                    )
                ]
        return []


def alike(treatments: Mapping[str, Treatment]) -> list[list[str]]:
    """Linears grouped by treatment, in order."""
    found: list[tuple[Treatment, list[str]]] = []
    for name, treatment in treatments.items():
        for known, names in found:
            if known == treatment:
                names.append(name)
                break
        else:
            found.append((treatment, [name]))
    return [names for _, names in found]


def _matches_other(pattern: str, model: OpenModel) -> bool:
    """Whether a pattern names a module that is no linear to quantize, as recipes of other tools name routers."""
    stored = {key.removesuffix(".weight") for key in model.names.values()}
    names = {name for name, _ in model.skeleton.model.named_modules()} | stored
    # What holds linears is not what is meant: they would be quantized in silence.
    holds = {each.rsplit(".", count)[0] for each in model.linears for count in range(1, each.count(".") + 1)} | {""}
    others = names - holds - set(model.linears)
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in others) and not any(
            re.match(pattern[3:], name) for name in holds
        )
    return pattern in others


def named(facts: LinearFacts, patterns: list[str], model: OpenModel) -> bool:
    """Whether one of ``targets``' patterns matches a linear's name in the model or in the checkpoint."""
    key = facts.key.removesuffix(".weight")
    for pattern in patterns:
        if pattern == HEAD:
            if facts.name == model.anatomy.head:
                return True
        elif pattern == "Linear":
            return True
        elif pattern.startswith("re:"):
            if re.match(pattern[3:], facts.name) or re.match(pattern[3:], key):
                return True
        elif pattern in (facts.name, key):
            return True
    return False
