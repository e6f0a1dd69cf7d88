"""The rehearsal ledger: what plans predict against what their programs do on fake tensors."""
