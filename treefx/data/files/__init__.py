"""Files, record by record: in goes a path, out come JSON values that know their file, line and field.

``opening`` unpacks and looks at the bytes, ``parsing`` finds the records among them, ``reading`` goes through files and
decides what becomes of broken ones, ``progress`` is the bar; ``values`` is what a record is read through.
"""

from treefx.data.files.reading import OnError, ReadReport, read_records
from treefx.data.files.values import Place, Value

__all__ = ["OnError", "Place", "ReadReport", "Value", "read_records"]
