"""Certificates, enrolment, identities and the audit log; a pure decider of its own."""
