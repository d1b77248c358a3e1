"""Agent trajectories: from files to batches of rows that share prefixes.

In: files of conversations, of compared answers or of judged ones, and traces of rollout engines. Out: samples (token
ids and labels), padded batches for an unmodified trainer, or forests with the indices that ``treefx.losses`` take.
``files`` reads records, ``formats`` interprets them, ``trajectories`` are the common forms; ``traces`` have token ids
already; ``tokenization`` and ``template`` are built-in tokenizers.

Order of imports, each only of what stands before an arrow::

    files -> trajectories, tokenization, traces -> formats, rows, scripted, trace_reading -> loading, template, chat ->
    grouping, samples, rank_steps -> batching, forest_batches, batch_sampler, prefix_sampler, packed_batches ->
    trace_batches -> statistics -> __init__
"""

from treefx.data.batch_sampler import TreeBatchSampler, distinct_tokens, first_fit_batches
from treefx.data.batching import Batch, batches, collate, prefix_order
from treefx.data.chat import ChatTokenizer
from treefx.data.chat.drift import Drift, DriftReport, find_drift, find_row_drift
from treefx.data.files import OnError, Place, ReadReport, Value, read_records
from treefx.data.forest_batches import (
    GroupBatch,
    JudgedBatch,
    PreferenceBatch,
    forest_of,
    group_batch,
    judged_batch,
    preference_batch,
)
from treefx.data.grouping import TrialGroup, group_trials, read_groups
from treefx.data.loading import holds_preferences, load, read_conversations, read_judged, read_preferences
from treefx.data.packed_batches import PackedBatch, packed_batches
from treefx.data.prefix_sampler import PrefixSampler, cut_into_batches
from treefx.data.samples import IGNORED, Form, Sample, make_samples, merge_turns, turn_samples, whole_sample
from treefx.data.scripted import scripted_conversations
from treefx.data.statistics import (
    SharingStatistics,
    group_by_task,
    pair_statistics,
    sharing_statistics,
    trace_statistics,
)
from treefx.data.tokenization import BpeTokenizer, ByteTokenizer, Tokenizer, train_tokenizer
from treefx.data.trace_batches import TraceBatch, TraceNodes, trace_batch, trace_nodes, trace_samples
from treefx.data.trace_reading import holds_traces, read_traces
from treefx.data.traces.trace import Trace, TraceNode
from treefx.data.traces.verl import traces_of_dataproto
from treefx.data.trajectories import Conversation, Judged, Message, Preference, Role, Text, ToolCall

__all__ = [
    "IGNORED",
    "Batch",
    "BpeTokenizer",
    "ByteTokenizer",
    "ChatTokenizer",
    "Conversation",
    "Drift",
    "DriftReport",
    "Form",
    "GroupBatch",
    "Judged",
    "JudgedBatch",
    "Message",
    "OnError",
    "PackedBatch",
    "Place",
    "Preference",
    "PreferenceBatch",
    "PrefixSampler",
    "ReadReport",
    "Role",
    "Sample",
    "SharingStatistics",
    "Text",
    "Tokenizer",
    "ToolCall",
    "Trace",
    "TraceBatch",
    "TraceNode",
    "TraceNodes",
    "TreeBatchSampler",
    "TrialGroup",
    "Value",
    "batches",
    "collate",
    "cut_into_batches",
    "distinct_tokens",
    "find_drift",
    "find_row_drift",
    "first_fit_batches",
    "forest_of",
    "group_batch",
    "group_by_task",
    "group_trials",
    "holds_preferences",
    "holds_traces",
    "judged_batch",
    "load",
    "make_samples",
    "merge_turns",
    "preference_batch",
    "packed_batches",
    "pair_statistics",
    "prefix_order",
    "read_conversations",
    "read_groups",
    "read_judged",
    "read_preferences",
    "read_records",
    "read_traces",
    "scripted_conversations",
    "sharing_statistics",
    "trace_batch",
    "trace_nodes",
    "trace_samples",
    "trace_statistics",
    "traces_of_dataproto",
    "train_tokenizer",
    "turn_samples",
    "whole_sample",
]
