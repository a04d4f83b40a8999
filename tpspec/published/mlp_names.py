"""What the tensors of an MLP, or of a mixture of experts, are called, and what is one tensor of them.

Data. Which types of models have which mixture is mixtures.py's matter.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Of one type of models."""

    module: str  # of the MLP, or the mixture, within its layer; empty where a mixture's parts are the layer's own

    # Within an MLP or an expert. Where gate and up have one name they are one matrix, gate's rows first.
    gate: str | None = "gate_proj"  # None: there is none
    up: str = "up_proj"
    down: str = "down_proj"
    _: KW_ONLY
    bends: tuple[str, str, str] | None = None  # three numbers of xielu, as model/mlps.py takes them

    # Within a mixture
    router: str = "gate"
    # Tensors that hold gate and up of all experts of a layer, in one or each alone, and down; None: each expert has
    # matrices of its own.
    together: tuple[str, ...] | None = None
    upright: bool = False  # those have a row for each output; else a row is an input's
    # Outputs of gate and up stand in turn; else gate's before up's, and checkpoints may have it the other way round, or
    # a matrix for each expert instead.
    alternate: bool = False
    shared_gate: str = "shared_expert_gate"  # of what the MLP beside the experts is multiplied with

    # Within a layer
    shared: str = "mlp.shared_experts"  # the MLP beside the experts
    correction: str = "mlp.gate.e_score_correction_bias"  # the bias by which experts are chosen
    may_lack_correction: bool = False  # whether it is zeros where a checkpoint lacks it
    dense: str | None = None  # the MLP of a layer without experts, if that is not called as the mixture is
    apart: tuple[str, str, str] | None = None  # gate, up and down of MLPs that are no experts, if called otherwise

    def within(self, layer: str) -> str:
        """What the names of its parts begin with. layer: the same of its layer."""
        return f"{layer}{self.module}." if self.module else layer

    @property
    def plain(self) -> MlpNames:
        """Of MLPs that are no experts."""
        if self.apart is None:
            return self
        gate, up, down = self.apart
        return replace(self, gate=gate, up=up, down=down, apart=None)

    @property
    def stacked(self) -> str | None:
        """The first of `together` as lists of modules have it; None where it is called as no module is."""
        first = "" if self.together is None else self.together[0]
        return first.removesuffix(".weight") if first.endswith(".weight") else None

    def without_experts(self, layer: str) -> str:
        """The same of the MLP of a layer that has none."""
        return self.within(layer) if self.dense is None else f"{layer}{self.dense}."


TOGETHER = ("experts.gate_up_proj", "experts.down_proj")
DENSE = MlpNames("mlp")
FUSED = MlpNames("mlp", gate="gate_up_proj", up="gate_up_proj")
UNGATED = MlpNames("mlp", gate=None)
BENT = MlpNames("mlp", gate=None, bends=("act_fn.alpha_p", "act_fn.alpha_n", "act_fn.beta"))
GRANITE = MlpNames(
    "block_sparse_moe",
    gate="input_linear",
    up="input_linear",
    down="output_linear",
    router="router.layer",
    shared="shared_mlp",
    together=("input_linear.weight", "output_linear.weight"),
    upright=True,
)
# Types whose MLPs have other names than DENSE.
MLPS = {
    "apertus": BENT,
    **dict.fromkeys(("arcee", "jais2", "nemotron"), UNGATED),
    "falcon_h1": MlpNames("feed_forward"),
    **dict.fromkeys(("glm", "glm4", "glm4v_text", "phi3"), FUSED),
    "exaone": MlpNames("mlp", "c_fc_0", "c_fc_1", "c_proj"),
    **dict.fromkeys(("lfm2", "lfm3"), MlpNames("feed_forward", gate="w1", up="w3", down="w2")),
    **dict.fromkeys(("nanochat", "phi"), MlpNames("mlp", gate=None, up="fc1", down="fc2")),
    "starcoder2": MlpNames("mlp", gate=None, up="c_fc", down="c_proj"),
}
