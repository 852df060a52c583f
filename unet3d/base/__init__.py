"""What all rooms use, free of torch until ranks join.

In reading order: `errors` (ends that were foreseen, with exit codes), `files` (written whole or not at all), `signals`
and `ranks` (processes of one run), `process` (this one); `types`, `terminal` and `progress` (what is printed).
"""
