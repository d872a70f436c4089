"""The operator's commands: certificates, tokens, the audit log, participants and the session."""
