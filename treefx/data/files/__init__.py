"""Read files record by record into JSON values that know their file, line and field.

``opening`` unpacks and looks at the bytes, ``parsing`` finds the records among them, ``torch_files`` loads what
``torch.save`` wrote, ``reading`` goes through files and
skips or raises for broken records, ``progress`` is the bar; ``values`` checks the fields of a record, and ``nulls``
counts or drops the null fields of objects that have any fields.
"""

from treefx.data.files.reading import JSON_SUFFIXES, MAX_RECORD_BYTES, OnError, ReadReport, read_records
from treefx.data.files.values import Place, Value

__all__ = ["JSON_SUFFIXES", "MAX_RECORD_BYTES", "OnError", "Place", "ReadReport", "Value", "read_records"]
