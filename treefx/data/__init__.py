"""Agent trajectories: loaders, a scripted agent, tokenizers, and the way from messages to padded batches."""

from treefx.data.batch_sampler import TreeBatchSampler, distinct_tokens, first_fit_batches
from treefx.data.batching import Batch, batches, collate, prefix_order
from treefx.data.loading import load
from treefx.data.samples import IGNORED, Form, Sample, make_samples, merge_turns, turn_samples, whole_sample
from treefx.data.scripted import scripted_conversations
from treefx.data.statistics import SharingStatistics, group_by_task, sharing_statistics
from treefx.data.tokenization import BpeTokenizer, ByteTokenizer, Tokenizer, train_tokenizer
from treefx.data.trajectories import Conversation, Message, Role, ToolCall

__all__ = [
    "IGNORED",
    "Batch",
    "BpeTokenizer",
    "ByteTokenizer",
    "Conversation",
    "Form",
    "Message",
    "Role",
    "Sample",
    "SharingStatistics",
    "Tokenizer",
    "ToolCall",
    "TreeBatchSampler",
    "batches",
    "collate",
    "distinct_tokens",
    "first_fit_batches",
    "group_by_task",
    "load",
    "make_samples",
    "merge_turns",
    "prefix_order",
    "scripted_conversations",
    "sharing_statistics",
    "train_tokenizer",
    "turn_samples",
    "whole_sample",
]
