"""Batch files in one place: everything that page and command line need to read a table and write its results.

The work is done by the modules named here; this one only gathers their names, so that a caller imports one module.
"""

from worker.export import EXPORT_FORMATS, ExportFormat, export_batch
from worker.image_zip import ImageZip, split_image_cell
from worker.plan import Plan, plan
from worker.results import Written, write_jevl, write_jsonl
from worker.results_csv import collect_question_types, neutralise, output_columns, question_types, write_csv
from worker.table_files import MAX_TABLE_BYTES, MAX_TABLE_ROWS, Table, TableError, TableRow, read_table
from worker.table_rows import ColumnMapping, RowNote, check_mapping, guess_mapping, table_rows

__all__ = [
    "EXPORT_FORMATS",
    "MAX_TABLE_BYTES",
    "MAX_TABLE_ROWS",
    "ColumnMapping",
    "ExportFormat",
    "ImageZip",
    "Plan",
    "RowNote",
    "Table",
    "TableError",
    "TableRow",
    "Written",
    "check_mapping",
    "collect_question_types",
    "export_batch",
    "guess_mapping",
    "neutralise",
    "output_columns",
    "plan",
    "question_types",
    "read_table",
    "split_image_cell",
    "table_rows",
    "write_csv",
    "write_jevl",
    "write_jsonl",
]
