"""Types, errors, protocols and the recorder, which all packages share. Importing them does not load torch or ray."""
