"""One decoder for all architectures, driven by a :class:`DecoderSpec`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ...system.errors import RuntimeProblem
from ..parallel.ranks import Ranks
from ..parallel.stages import ConnectedStages, Stages
from ..weights.cache_scheme import cache_scheme
from ..weights.checkpoint import Checkpoint
from ..weights.live_weights import LiveWeights
from ..weights.offload import LayersStream, OffloadedLayers
from .adapters import Adapters, StepRows
from .architectures import spec_of
from .layer import DecoderLayer
from .linears.linear import Linear
from .linears.token_table import TokenTable
from .loader import DecoderLoader
from .parallel.context_parallel import ContextBatch
from .parallel.pipeline import Result, pieces_of, pipelined
from .parallel.sharded import DividedTable
from .parallel.staged_states import StagedStates
from .parts.batch import Batch, Run
from .parts.draft_inputs import AuxStates, StatesSink
from .parts.kv_cache import KeysValues
from .parts.operators import Operators, Rotation, Rowwise, Stack
from .parts.rope import Rotations


class Model:
    """A decoder with its weights.

    Attributes:
        spec: its architecture.
        operators: its implementation of the parts.
        ranks: that have a share of each layer.
        stages: that have some of the layers.
        context: ranks that have a part of each sequence.
        dtype: its compute dtype.
        device: where.
        layers: this stage's.
        logit_statistics: computes statistics of rows of logits.
        draw_tokens: chooses tokens from rows of logits.
        stack: computes all layers at once, where supported.
        aux: takes the states between layers that a draft head reads; None if there is none.
        is_tied: whether lm_head's weight is the embedding's.
        stream: brings the layers' weights, if they are offloaded; None otherwise.
        rotations: its rotary positions.
        cache_scheme: how keys and values are rounded, if the checkpoint sets it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | LiveWeights,
        operators: Operators,
        ranks: Ranks | None = None,
        stages: Stages | None = None,
        context: Ranks | None = None,
        offload: OffloadedLayers | None = None,
        *,
        divides_experts: bool = False,
    ) -> None:
        self.spec = spec_of(checkpoint.config)
        self.ranks, self.stages, self.context = ranks or Ranks(), stages or Stages(), context or Ranks()
        checkpoint.check()
        self.operators = operators
        self.dtype = dtype = operators.dtype
        self.device = operators.device
        self.logit_statistics = operators.logit_statistics
        self.draw_tokens = operators.draw_tokens
        load = DecoderLoader(
            checkpoint, self.spec, operators, self.ranks, context=self.context, divides_experts=divides_experts
        )
        names = self.spec.names
        first, last = self.stages.is_first, self.stages.is_last
        self.is_tied = tied = self.spec.tied or not checkpoint.has_matrix(names.head)
        self._embedding = load.table(names.embedding, self.spec.vocabulary) if first or (last and tied) else None
        self._positions = load.tensor(f"{names.positions}.weight", None) if names.positions and first else None
        self._project_in = load.linear(names.project_in) if names.project_in and first else None
        self.layers: list[DecoderLayer] = []
        self._offload = offload
        self.stream: LayersStream | None = None
        own = self.stages.layers(len(self.spec.layers))
        for i in own:
            make = partial(DecoderLayer, load, self.spec, self.spec.layers[i], i)
            self.layers.append(make() if offload is None else offload.build(make))
        attending = [i for i in own if self.spec.layers[i].attends]
        self.cache_scheme = cache_scheme(
            checkpoint.cache_args,
            checkpoint,
            [names.layer.format(i=i) + names.query_key_value[0].rpartition(".")[0] for i in attending],
            [self.spec.layers[i].key_value_heads or self.spec.key_value_heads for i in attending],
            self.spec.head_size,
        )
        if offload is not None:
            self.stream_layers(0)  # whoever knows how much memory is left may let more of them stay
        whole = not self._is_divided and offload is None
        self._lowered = operators.lower(self._through_layers) if whole else None
        self.stack: Stack | None = None
        # Neither attends around a ring, nor norms heads that other ranks have.
        if (
            self.layers
            and self.context.count == 1
            and not (self.ranks.count > 1 and self.spec.query_key_norm == "whole")
        ):
            reach = None if offload is None else self._reach
            self.stack = operators.stack([layer.parts for layer in self.layers], reach)
        self._head: Head | None = None
        if last:
            matrix = self._embedding.matrix if tied and self._embedding is not None else None
            head = load.head(names.head if matrix is None else names.embedding, matrix)
            project_out = load.linear(names.project_out) if names.project_out else None
            norm = load.norm(names.final_norm)
            self._head = Head(norm, project_out, head, self.spec.logit_cap, operators.to_float32)
        self.rotations = Rotations(self.spec.ropes, dtype)
        scale = self.spec.embedding_scale
        # In the model's dtype, as in transformers.
        self._embedding_scale = None if scale is None else torch.tensor(scale, device=self.device).to(dtype)
        self.aux: AuxStates | None = None
        self._staged: StagedStates | None = None
        self._adapters: Adapters | None = None
        self._shares: set[str] = set()  # tables that are another model's

    @property
    def _is_divided(self) -> bool:
        return max(self.ranks.count, self.stages.count, self.context.count) > 1

    def stream_layers(self, resident: int) -> None:
        """Bring offloaded layers ahead of their use.

        Args:
            resident: bytes of them that may stay in memory from step to step.
        """
        if self._offload is not None:
            self.stream = None  # and its buffers
            self.stream = self._offload.stream(resident)

    def _reach(self, index: int) -> None:
        """One of this stage's layers is to be computed."""
        if self.stream is not None:
            self.stream.reach(index)

    @torch.inference_mode()
    def __call__(self, batch: Batch, store: KeysValues) -> Tensor:
        """Logits ``[wanted, vocabulary]`` of a step's tokens; their keys and values go to ``store``."""
        if isinstance(self.stages, ConnectedStages):
            vocabulary = Result(self.logits, lambda piece: len(piece.wanted), self.spec.vocabulary, torch.float32)
            return self._pipelined(self.stages, batch, store, vocabulary)
        found = self.logits(self.hidden(batch, store), batch)
        return batch.all_wanted(found) if isinstance(batch, ContextBatch) else found

    def batch(self, runs: list[Run], block_size: int) -> Batch:
        """A step's tokens, or this rank's part of them.

        Args:
            runs: at least one.
            block_size: positions of a cache block that a rank has.
        """
        if self.context.count == 1:
            return Batch(runs, block_size)
        return ContextBatch(runs, block_size, self.context)

    @torch.inference_mode()
    def states(self, batch: Batch, store: KeysValues) -> Tensor:
        """What the lm_head multiplies, for all of a step's tokens: transformers' ``last_hidden_state``.

        Of several ranks the one that samples gets it.
        """
        if isinstance(self.stages, ConnectedStages):
            states = Result(
                lambda hidden, _: self.head.states(hidden), lambda piece: len(piece.tokens), self.width, self.dtype
            )
            return self._pipelined(self.stages, batch, store, states)
        found = self.head.states(self.hidden(batch, store))
        return batch.all_tokens(found) if isinstance(batch, ContextBatch) else found

    def _pipelined(self, stages: ConnectedStages, batch: Batch, store: KeysValues, result: Result) -> Tensor:
        # Of offloaded layers all would be brought for each piece.
        pieces = [batch.runs] if self.offloads else pieces_of(batch, stages.count)
        aux = self._staged if self._staged is not None and self._staged.belongs(store) else None
        return pipelined(self, stages, pieces, batch.block_size, store, self.spec.hidden, result, aux)

    def leave_states(self, after: Sequence[int], store: KeysValues, sink: StatesSink, *, waits: bool = False) -> None:
        """Let steps leave hidden states between layers, which a draft head on the first rank reads; with ``pp`` and ``cp`` others call it, too.

        Args:
            after: after how many layers, each.
            store: the keys and values of these steps; those with others leave none.
            sink: gets a step's states, all of them on the first rank.
            waits: whether it synchronizes with the device.
        """
        if isinstance(self.stages, ConnectedStages):
            self._staged = StagedStates(after, len(self.spec.layers), self.stages, store, sink, waits=waits)
            self.aux = self._staged.own
        else:
            self.aux = AuxStates(after, store, sink, waits=waits)

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The logits that a step wants of its last layer's outputs."""
        return self.head(hidden if len(batch.wanted) == len(batch.tokens) else hidden[batch.wanted])

    @property
    def width(self) -> int:
        """Of :meth:`states`."""
        # A projection takes the last layer's outputs back to the width of embeddings.
        if self.spec.names.project_out is None or self._embedding is None:
            return self.spec.hidden
        return self._embedding.columns

    @property
    def token_table(self) -> TokenTable | DividedTable:
        """The input embedding, which the first stage has."""
        if self._embedding is None:
            raise RuntimeProblem("another stage has the embedding; use an engine with pp=1")
        return self._embedding

    @property
    def head(self) -> Head:
        """Final norm and lm_head, which the last stage has."""
        if self._head is None:
            raise RuntimeProblem("another stage has the head; use an engine with pp=1")
        return self._head

    @torch.inference_mode()
    def hidden(self, batch: Batch, store: KeysValues) -> Tensor:
        """The last layer's outputs for a step's tokens, ``[tokens, hidden]``; :attr:`head` computes logits from them."""
        return self.through(self.embed(batch.tokens, batch.positions), batch, store)

    def through(self, hidden: Tensor, batch: Batch, store: KeysValues) -> Tensor:
        """Hidden states through the layers."""
        rotations = self.rotations.of(batch.positions, batch.lengths)
        if self._adapters is not None and (batch.adapted or self._adapters.rows.of):
            self._adapters.rows.of = batch.adapted
        aux = self.aux if self.aux is not None and self.aux.belongs(store) else None
        if aux is not None:
            aux.begin(hidden)
        with nullcontext() if self.stream is None else self.stream.step():
            if not batch.adapted and self.stack is not None and self.stack.takes(batch, store):
                hidden = self.stack(hidden, rotations, store, batch, aux)
            elif batch.adapted or aux is not None:
                hidden = self._through_layers(hidden, rotations, store, batch, aux)
            else:
                hidden = (self._lowered or self._through_layers)(hidden, rotations, store, batch)
        if aux is not None:
            states = aux.taken(len(self.layers), hidden)
            if isinstance(batch, ContextBatch):
                states, batch = batch.all_tokens(states), batch.undivided
            aux.give(states, batch.slots, batch.also)
        return hidden

    def adapters(self) -> Adapters:
        """The LoRA adapters beside it; the first call makes its linears ready for them.

        Raises:
            RuntimeProblem: its operators cannot apply any.
        """
        if self._is_divided:
            raise RuntimeProblem("adapters are not applied on several ranks; merge the adapter with smelt merge")
        if not self.operators.takes_adapters:
            raise RuntimeProblem(
                "adapters are applied on a CPU, without compile and reproducible; set these so, or merge the adapter with smelt merge"
            )
        if self._adapters is None:
            rows = StepRows()
            targets = [target for layer in self.layers for target in layer.adapt(rows)]
            self._adapters = Adapters(targets, rows, self.dtype, self.device)
        return self._adapters

    def _through_layers(
        self,
        hidden: Tensor,
        rotations: dict[str, Rotation],
        store: KeysValues,
        batch: Batch,
        aux: AuxStates | None = None,
    ) -> Tensor:
        cached = 0
        for index, layer in enumerate(self.layers):
            self._reach(index)
            if aux is not None:
                aux.take(index, hidden)
            hidden = layer(hidden, rotations, store, cached, batch)
            cached += layer.attends
        return hidden

    @torch.inference_mode()
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The first layer's inputs."""
        assert self._embedding is not None, "the first stage has it"
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
        return [layer.shared for layer in self.layers if layer.attends]

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
        found = {} if self._head is None else {"head": self._head.linear}
        first = self.stages.layers(len(self.spec.layers)).start
        for i, layer in enumerate(self.layers, first):
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

    def resident_bytes(self) -> int:
        """Memory of the weights that must be there at once: of offloaded layers, two."""
        if self._offload is None:
            return self.nbytes()
        return self.nbytes() - self._offload.bytes + 2 * self._offload.largest

    @property
    def offloads(self) -> bool:
        """Whether its layers' weights are elsewhere."""
        return self._offload is not None

    def first_layers(self, count: int) -> Model:
        """A model of its first layers, the same ones, and its head; or this stage's part of it.

        Args:
            count: how many.
        """
        found = copy.copy(self)
        found.aux = found._staged = None
        before = self.stages.layers(len(self.spec.layers)).start
        found.layers = self.layers[: max(0, count - before)]
        found._lowered = None if self._is_divided else self.operators.lower(found._through_layers)
        found.stack = None
        if self.stack is not None and found.layers:
            found.stack = self.operators.stack([layer.parts for layer in found.layers])
        return found

    def share_tables(self, other: Model) -> None:
        """Use another model's embedding and lm_head in the place of equal ones, whose memory becomes free.

        Args:
            other: a model on the same device.
        """
        mine, its = self._embedding, other._embedding
        if isinstance(mine, TokenTable) and isinstance(its, TokenTable) and mine.equals(its):
            self._embedding = its
            self._shares.add("embedding")
        if self._head is not None and other._head is not None and self.width == other.width:
            probe = torch.randn(2, self.width, generator=torch.Generator().manual_seed(0)).to(self.device, self.dtype)
            a, b = self._head.linear, other._head.linear
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                same = torch.equal(a(probe), b(probe))
            if same:
                self._head.linear = b
                self._shares.add("head")

    def own_bytes(self) -> int:
        """Bytes of the weights, without those that :meth:`share_tables` found in another model."""
        shared = 0
        if "embedding" in self._shares:
            shared += self._embedding_bytes
        if "head" in self._shares and self._head is not None:
            shared += self._head.linear.nbytes
        return self.nbytes() - shared

    @property
    def _embedding_bytes(self) -> int:
        """Of the embedding, unless they are lm_head's."""
        embedding = 0 if self._embedding is None else self._embedding.nbytes
        tied = self.spec.tied and self._head is not None and self._head.linear.nbytes == embedding
        return 0 if tied else embedding

    def nbytes(self) -> int:
        """Bytes of the weights, wherever they are."""
        return self._embedding_bytes + sum(module.nbytes for module in self.linears().values())


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
        return self.logits(self.states(hidden), out)

    @torch.inference_mode()
    def logits(self, states: Tensor, out: Tensor | None = None) -> Tensor:
        """The same from what :meth:`states` returns."""
        logits = self._to_float32(self.linear(states), out)
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
