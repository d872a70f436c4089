"""Enrolment: how a site gets its certificate, keeps it, and renews it."""
