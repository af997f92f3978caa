"""Types, errors, ports and the recorder, which all packages share. Importing them loads neither torch nor ray."""
