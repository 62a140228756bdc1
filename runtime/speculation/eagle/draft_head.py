"""A draft head of EAGLE-3: a decoder of one layer, which reads tokens beside states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....system.errors import RuntimeProblem
from ...decoder.layer import DecoderLayer
from ...decoder.linears.linear import Linear
from ...decoder.linears.token_table import TokenTable
from ...decoder.loader import DecoderLoader
from ...decoder.model import Head, Model
from ...decoder.parts.batch import Batch, Run
from ...decoder.parts.draft_inputs import JoinedInputs
from ...decoder.parts.kv_cache import KeysValues
from ...decoder.parts.operators import Operators
from ...decoder.parts.rope import Rotations
from ...parallel.ranks import Ranks
from ...weights.checkpoint import Checkpoint
from .head_checkpoint import STATES, HeadCheckpoint


class DraftHead:
    """A draft head with its weights.

    Args:
        checkpoint: its directory.
        model: that it drafts for, whose embedding it uses, unless it has its own; and whose lm_head, if it has none.
        opened: the model's checkpoint, from which these are read whole if the model is divided between ranks.
        operators: its implementation of the parts.

    Attributes:
        after: after how many of the model's layers the states are taken that it reads.
        tokens: which token of the model's vocabulary each of its logits is for ``[draft vocabulary]``; None for the same order.
        stack: its layer, where that is computed at once.

    Raises:
        SmeltError: a tensor is missing, or it is not a head for this model.
    """

    def __init__(self, checkpoint: HeadCheckpoint, model: Model, opened: Checkpoint, operators: Operators) -> None:
        self.path = checkpoint.path
        spec = self._spec = checkpoint.spec
        self._operators, self._model = operators, model
        self.device, self.dtype = operators.device, operators.dtype
        self.draw_tokens = operators.draw_tokens
        count = len(model.spec.layers)
        self.after = checkpoint.settings.layers(count)
        if min(self.after) < 0 or max(self.after) > count:
            raise RuntimeProblem(
                f"{self.path}: it reads states after {', '.join(map(str, self.after))} layers, and the model has {count}; use"
                " a head that was trained for this model"
            )
        load = DecoderLoader(checkpoint, spec, operators, Ranks())
        settings = checkpoint.settings
        self._fuse = load.linear("fc", shape=(spec.hidden, STATES * model.spec.hidden))
        checkpoint.check()
        self._norms_all = settings.norms_all
        self._norm_all = load.norm("input_norm" if settings.norms_all else None)
        self._norm_each: Callable[[Tensor], Tensor] | None = None
        if settings.norms_each:
            width = model.spec.hidden
            # One norm of all, and their weights as Llama has them: after rounding.
            norm = operators.rms_norm(torch.ones(width, device=self.device), spec.eps, rounds_first=True)
            weights = torch.cat([load.tensor(f"fc_norm.{i}.weight", (width,)) for i in range(STATES)])
            self._norm_each = lambda states: norm(states.view(-1, width)).view(states.shape) * weights
        self._norms_outputs = settings.norms_outputs
        self._token_norm = load.norm(f"{spec.names.layer}input_layernorm")
        self._first_norm = load.norm(f"{spec.names.layer}hidden_norm" if settings.norms_first else None)
        self._layer = DecoderLayer(load, spec, spec.layers[0], 0)
        entry = self._layer.parts.norms["before_attention"]
        assert isinstance(entry, JoinedInputs)
        self._entry = entry
        self.stack = operators.stack([self._layer.parts])
        own = checkpoint.has_matrix("embed_tokens")
        needed = model.spec.vocabulary
        undivided = DecoderLoader(opened, model.spec, operators, Ranks())
        self._table: Any = model.token_table
        if own:
            self._table = TokenTable(load.matrix("embed_tokens", kind="Embedding"), operators.dtype, operators.device)
            rows = self._table.matrix.shape[0]
            if rows < needed:
                raise RuntimeProblem(
                    f"{self.path}: its embeddings are of {rows} tokens, and the model has {needed}; use a head that was trained for this"
                    " model"
                )
            if isinstance(model.token_table, TokenTable) and self._table.equals(model.token_table):
                own, self._table = False, model.token_table
        elif model.ranks.count > 1:
            own, self._table = True, undivided.table(model.spec.names.embedding, needed)
        if self._table.columns != spec.hidden:
            raise RuntimeProblem(
                f"{self.path}: it is {spec.hidden} wide, and the model's embeddings are {self._table.columns}; use a head that was"
                " trained for this model"
            )
        shares_head = not checkpoint.has_matrix("lm_head")
        whole = model.ranks.count == model.stages.count == 1  # then the model has all of its lm_head here
        if not shares_head:
            linear = load.linear("lm_head", shape=(spec.vocabulary, spec.hidden))
        elif whole:
            linear = model.head.linear
        else:
            name = model.spec.names.embedding if model.is_tied else model.spec.names.head
            tied = undivided.matrix(name, kind="Embedding") if model.is_tied else None
            linear = undivided.head(name, tied)
        if shares_head and linear.columns != spec.hidden:
            raise RuntimeProblem(
                f"{self.path}: it has no lm_head, and the model's reads {linear.columns} values, not {spec.hidden}; use a head"
                " that was trained for this model"
            )
        self.head = Head(load.norm("norm"), None, linear, None, operators.to_float32)
        self.tokens = self._mapping(checkpoint, own=not shares_head)
        self.rotations = Rotations(spec.ropes, operators.dtype)
        parts = [self._fuse, *self._layer.linears().values(), *([] if shares_head and whole else [linear])]
        self.nbytes = sum(part.nbytes for part in parts) + (self._table.nbytes if own else 0)

    def _mapping(self, checkpoint: HeadCheckpoint, *, own: bool) -> Tensor | None:
        vocabulary, mine = self._model.spec.vocabulary, self._spec.vocabulary
        if not own:
            return None
        if not checkpoint.has("d2t"):
            if mine != vocabulary:
                raise RuntimeProblem(
                    f"{self.path}: it has a vocabulary of {mine} tokens without d2t, and the model of {vocabulary}; use a head that was"
                    " trained for this model"
                )
            return None
        shifts = checkpoint.tensor("d2t").long()
        tokens = torch.arange(mine) + shifts if shifts.shape == (mine,) else None
        if tokens is None or tokens.min() < 0 or tokens.max() >= vocabulary or len(tokens.unique()) < mine:
            raise RuntimeProblem(
                f"{self.path}: d2t does not give each of {mine} draft tokens another one of the model's {vocabulary}; use a head that was"
                " trained for this model"
            )
        return tokens

    @property
    def hidden(self) -> int:
        """Its width."""
        return self._spec.hidden

    def linears(self) -> dict[str, Linear]:
        """Its linears, by role."""
        return {"fuse": self._fuse, **self._layer.linears(), "head": self.head.linear}

    def keys_values(self, blocks: int, block_size: int) -> KeysValues:
        """An empty cache for its layer."""
        return self._operators.keys_values(
            self._spec.cached_heads, self._spec.head_size, blocks, block_size, self.dtype
        )

    def block_bytes(self, block_size: int) -> int:
        """Memory of a cache block: its keys and values, and the fused states of the tokens."""
        kept = self._operators.block_bytes(self._spec.cached_heads, self._spec.head_size, block_size, self.dtype)
        return kept + block_size * self.hidden * self.dtype.itemsize

    @property
    def fuse_waits(self) -> bool:
        """Whether fusing synchronizes with the device."""
        return self._fuse.waits

    def step_bytes(self, tokens: int) -> int:
        """Memory of fusing the states of so many tokens."""
        read = self._fuse.columns  # taken, normed together, or normed each and multiplied
        copies = 1 + (self._norm_each is not None) * 2 + self._norms_all
        return tokens * (copies * read + 2 * self.hidden) * self.dtype.itemsize

    def batch(self, runs: list[Run], block_size: int) -> Batch:
        """A step's tokens."""
        return Batch(runs, block_size)

    def fuse(self, states: Tensor) -> Tensor:
        """From a model's states ``[tokens, states x hidden]``, one after another, to its own width."""
        states = self._norm_all(states)
        if self._norm_each is not None:
            states = self._norm_each(states)
        return self._fuse(states)

    def end(self, hidden: Tensor, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits, in ``room`` if there is one, and the states with which a draft goes on, from the layer's outputs."""
        states = self.head.states(hidden)
        return self.head.logits(states, room), states if self._norms_outputs else hidden

    def begin(self, tokens: Tensor, states: Tensor) -> Tensor:
        """What its layer reads ``[tokens, hidden]``, which takes the embeddings of tokens when it begins with that."""
        self._entry.tokens = self._token_norm(self._table(tokens))
        return self._first_norm(states)

    @torch.inference_mode()
    def __call__(self, batch: Batch, states: Tensor, store: KeysValues) -> tuple[Tensor, Tensor]:
        """What comes after some tokens.

        Args:
            batch: the tokens, each at the position of the one before it.
            states: what the model made of the ones before, fused; or what this returned for them ``[tokens, hidden]``.
            store: its keys and values, which go there.

        Returns:
            Logits of the wanted tokens ``[wanted, draft vocabulary]`` in float32, and their states.
        """
        hidden = self.begin(batch.tokens, states)
        rotations = self.rotations.of(batch.positions, batch.lengths)
        if self.stack is not None and self.stack.takes(batch, store):
            hidden = self.stack(hidden, rotations, store, batch)
        else:
            hidden = self._layer(hidden, rotations, store, 0, batch)
        hidden = hidden[batch.wanted]
        if not len(hidden):  # a part of a prompt
            return hidden.new_empty(0, self._spec.vocabulary, dtype=torch.float32), hidden
        return self.end(hidden)
