"""Files of text: ``text_files`` (records of .jsonl, .txt and tables), ``tables`` (.parquet, .arrow, .csv), ``folders``,
and ``remote`` (object stores and web servers)."""
