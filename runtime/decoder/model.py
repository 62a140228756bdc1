"""One decoder for all architectures, driven by a :class:`DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ...system.errors import RuntimeProblem
from ..parallel.ranks import Ranks
from ..weights.cache_scheme import cache_scheme
from ..weights.checkpoint import Checkpoint
from ..weights.live_weights import LiveWeights
from .adapters import Adapters, StepRows
from .architectures import spec_of
from .batch import Batch
from .kv_cache import KeysValues
from .layer import DecoderLayer
from .linear import Linear
from .loader import DecoderLoader
from .operators import Operators, Rotation, Rowwise
from .rope import Rotations


class Model:
    """A decoder with its weights.

    Attributes:
        spec: its architecture.
        operators: its implementation of the parts.
        ranks: that have a share of it each.
        dtype: its compute dtype.
        device: where.
        head: final norm and lm_head.
        logit_statistics: computes statistics of rows of logits.
        stack: computes all layers at once, where supported.
        rotations: its rotary positions.
        cache_scheme: how keys and values are rounded, if the checkpoint sets it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | LiveWeights,
        operators: Operators,
        progress: Callable[[int, int], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.spec = spec_of(checkpoint.config)
        self.ranks = ranks or Ranks()
        checkpoint.check()
        self.operators = operators
        self.dtype = dtype = operators.dtype
        self.device = operators.device
        self.logit_statistics = operators.logit_statistics
        load = DecoderLoader(checkpoint, self.spec, operators, self.ranks)
        names = self.spec.names
        self._embedding = load.table(names.embedding, self.spec.vocabulary)
        self._positions = load.tensor(f"{names.positions}.weight", None) if names.positions else None
        self._project_in = load.linear(names.project_in) if names.project_in else None
        self._layers: list[DecoderLayer] = []
        for i, layer in enumerate(self.spec.layers):
            self._layers.append(DecoderLayer(load, self.spec, layer, i))
            if progress:
                progress(i + 1, len(self.spec.layers))
        self.cache_scheme = cache_scheme(
            checkpoint.cache_args,
            checkpoint,
            [
                names.layer.format(i=i) + names.query_key_value[0].rpartition(".")[0]
                for i, layer in enumerate(self.spec.layers)
                if layer.attends
            ],
            self.spec.cached_heads,
            self.spec.head_size,
        )
        alone = self.ranks.count == 1
        # These compute all layers without the ranks' sums.
        self._run = operators.lower(self._through_layers) if alone else self._through_layers
        self.stack = operators.stack([layer.parts for layer in self._layers]) if alone else None
        tied = self.spec.tied or not checkpoint.has_matrix(names.head)
        head = load.head(names.embedding if tied else names.head, self._embedding.matrix if tied else None)
        project_out = load.linear(names.project_out) if names.project_out else None
        self.head = Head(load.norm(names.final_norm), project_out, head, self.spec.logit_cap, operators.to_float32)
        self.rotations = Rotations(self.spec.ropes, dtype)
        scale = self.spec.embedding_scale
        # In the model's dtype, as in transformers.
        self._embedding_scale = None if scale is None else torch.tensor(scale, device=self.device).to(dtype)
        self._adapters: Adapters | None = None

    @torch.inference_mode()
    def __call__(self, batch: Batch, store: KeysValues) -> Tensor:
        """Logits ``[wanted, vocabulary]`` of a step's tokens; their keys and values go to ``store``."""
        hidden = self.hidden(batch, store)
        return self.head(hidden if len(batch.wanted) == len(batch.tokens) else hidden[batch.wanted])

    @torch.inference_mode()
    def hidden(self, batch: Batch, store: KeysValues) -> Tensor:
        """The last layer's outputs for a step's tokens, ``[tokens, hidden]``; :attr:`head` computes logits from them."""
        hidden = self.embed(batch.tokens, batch.positions)
        rotations = self.rotations.of(batch.positions, batch.lengths)
        if self._adapters is not None and (batch.adapted or self._adapters.rows.of):
            self._adapters.rows.of = batch.adapted
        if batch.adapted:
            return self._through_layers(hidden, rotations, store, batch)
        if self.stack is not None and self.stack.takes(batch, store):
            return self.stack(hidden, rotations, store, batch)
        return self._run(hidden, rotations, store, batch)

    def adapters(self) -> Adapters:
        """The LoRA adapters beside it; the first call makes its linears ready for them.

        Raises:
            RuntimeProblem: its operators cannot apply any.
        """
        if self.ranks.count > 1:
            raise RuntimeProblem("adapters are not applied on several ranks; merge the adapter with smelt merge")
        if not self.operators.takes_adapters:
            raise RuntimeProblem(
                "adapters are applied on a CPU, without compile and reproducible; set these so, or merge the adapter with smelt merge"
            )
        if self._adapters is None:
            rows = StepRows()
            targets = [target for layer in self._layers for target in layer.adapt(rows)]
            self._adapters = Adapters(targets, rows, self.dtype, self.device)
        return self._adapters

    def _through_layers(
        self, hidden: Tensor, rotations: dict[str, Rotation], store: KeysValues, batch: Batch
    ) -> Tensor:
        cached = 0
        for layer in self._layers:
            hidden = layer(hidden, rotations, store, cached, batch)
            cached += layer.attends
        return hidden

    @torch.inference_mode()
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The first layer's inputs."""
        hidden = self._embedding(tokens)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            hidden = hidden + functional.embedding(positions + self.spec.position_offset, self._positions)
        return hidden

    def kept(self, wanted: torch.dtype) -> torch.dtype:
        """The KV cache dtype: the requested one, unless the checkpoint sets how keys and values are rounded."""
        if self.cache_scheme is None:
            return wanted
        codes = self.cache_scheme.kept
        return self.dtype if codes is None or not self.operators.keeps(codes) else codes

    def keys_values(self, blocks: int, block_size: int, wanted: torch.dtype) -> KeysValues:
        """An empty cache for this model."""
        spec, kept = self.spec, self.kept(wanted)
        scheme = None if self.cache_scheme is None else self.cache_scheme.of_heads(self._local_heads)
        rules = None if scheme is None else scheme.rules(self.dtype, kept, self.device)
        return self.operators.keys_values(self.cached_heads, spec.head_size, blocks, block_size, kept, rules)

    @property
    def _local_heads(self) -> list[range]:
        """This rank's key-value heads of each layer with a KV cache."""
        return [layer.shared for layer in self._layers if layer.attends]

    @property
    def cached_heads(self) -> tuple[int, ...]:
        """How many they are."""
        return tuple(map(len, self._local_heads))

    @property
    def cache_variants(self) -> bool:
        """Whether equal tokens may have different keys, because RoPE depends on the sequence's largest length."""
        return self.rotations.by_length

    def variant(self, length: int) -> tuple[int, ...]:
        """An identifier of the RoPE variant of sequences that may grow to ``length``."""
        return tuple(self.rotations.variants(length).values())

    def linears(self) -> dict[str, Linear]:
        """Every linear, by role."""
        found = {"head": self.head.linear}
        for i, layer in enumerate(self._layers):
            found |= {f"layer {i} {role}": module for role, module in layer.linears().items()}
        return found

    def bytes_per_token(self) -> int:
        """Bytes of weights that a single token reads; for a mixture of experts, those of the chosen experts."""
        return int(sum(self._share(role) * module.nbytes for role, module in self.linears().items()))

    def operations_per_token(self) -> float:
        """Additions and multiplications of the linears, for one token of a prompt; the head reads only the last one."""
        return sum(2 * self._share(role) * module.numel for role, module in self.linears().items() if role != "head")

    def _share(self, role: str) -> float:
        return self.spec.experts_per_token / self.spec.experts if " expert " in role else 1.0

    def nbytes(self) -> int:
        """Memory of the weights."""
        embedding = (
            0 if self.spec.tied and self.head.linear.nbytes == self._embedding.nbytes else self._embedding.nbytes
        )
        return embedding + sum(module.nbytes for module in self.linears().values())


class Head:
    """The final norm and lm_head.

    Attributes:
        linear: the lm_head.
    """

    def __init__(
        self,
        norm: Rowwise,
        project: Linear | None,
        linear: Linear,
        cap: float | None,
        to_float32: Callable[[Tensor, Tensor | None], Tensor],
    ) -> None:
        self._norm, self._project, self.linear, self._cap, self._to_float32 = norm, project, linear, cap, to_float32

    @torch.inference_mode()
    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[tokens, hidden]`` to ``[tokens, vocabulary]``, in float32; to ``out``, if there is one."""
        logits = self.linear(self.states(hidden))
        logits = self._to_float32(logits, out)
        if self._cap is None:
            return logits
        if out is not None:
            return out.div_(self._cap).tanh_().mul_(self._cap)
        return torch.tanh(logits / self._cap) * self._cap

    @torch.inference_mode()
    def states(self, hidden: Tensor) -> Tensor:
        """What the lm_head multiplies: transformers' ``last_hidden_state``."""
        hidden = self._norm(hidden)
        return hidden if self._project is None else self._project(hidden)
