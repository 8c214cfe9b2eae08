"""Show a server's pages for users and logins, and for administrators: users and the audit of their changes."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlencode

from broker.dashboard.html import Content, Markup, element, join, table
from broker.dashboard.people import AUDIT_MAX, PersonRow
from broker.formatting import format_duration, format_second, format_usd
from broker.state.people import AuditEvent, Token

USERS, AUDIT = "/admin/users", "/admin/audit"
ITSELF = "(started on the server itself)"


def show_people(rows: Sequence[PersonRow], now_s: float) -> Markup:
    """Show each user with role, tokens, last change, jobs and spending."""
    cells: list[Sequence[Content]] = [
        [
            ITSELF if row.user is None else element("a", row.user, href=f"{AUDIT}?{urlencode({'user': row.user})}"),
            "-" if row.role is None else row.role.value, row.token_count,
            "-" if row.changed_s is None else f"{format_duration(max(0.0, now_s - row.changed_s))} ago",
            row.live_jobs, row.jobs, row.clusters, format_usd(row.month_usd),
        ]
        for row in rows
    ]  # fmt: skip
    heads = ["User", "Role", "Valid tokens", "Last change", "Live jobs", "Jobs", "Clusters", "USD this month"]
    right = ["Valid tokens", "Live jobs", "Jobs", "Clusters", "USD this month"]
    about = "Reading is not recorded: the last change is the last command that started or changed something."
    return join([table(heads, cells, caption="Users", right=right), element("p", about, class_="faint")])


def show_audit(events: Sequence[AuditEvent], *, user: str, verb: str, outcome: str) -> Markup:
    """Show changes, newest first, with a form that filters them."""
    cells = [
        [format_second(each.time_s), each.user, each.verb, each.target,
         each.outcome]
        for each in events
    ]  # fmt: skip
    heads = ["Time", "User", "Verb", "Target", "Outcome"]
    fields = [
        element("label", label, " ", element("input", name=name, value=value, maxlength=100))
        for label, name, value in (("User", "user", user), ("Verb", "verb", verb), ("Outcome", "outcome", outcome))
    ]
    form = element("form", *fields, element("button", "Filter", type="submit"), method="get", action=AUDIT)
    shown = table(heads, cells, caption="Audit") if cells else element("p", "No change matches.")
    more = f"The newest {AUDIT_MAX}; older ones: `broker server audit --json` on the server's machine."
    return join([form, shown, element("p", more, class_="faint") if len(cells) == AUDIT_MAX else None])


def show_login(action: str, issuer: str | None) -> Markup:
    """Show the form that takes the token of a user, and the link to a login through the `issuer`, if there is one."""
    field = element(
        "input", type="password", name="token", required=True, autocomplete="off", aria_describedby="about-token"
    )
    about = "Use the same token as for `broker login`. The session ends after 12 hours, or when the token is revoked."
    form = element(
        "form",
        element("label", "Token ", field),
        element("p", about, id="about-token", class_="faint"),
        element("button", "Log in", type="submit"),
        method="post", action=action,
    )  # fmt: skip
    link = element("p", element("a", "Log in with your organization's account", href=issuer)) if issuer else None
    return join([link, form])


def show_session(token: Token, action: str, ticket: str) -> Markup:
    """Show whose session it is, with a form that ends it; visitors from a proxy have no ticket, and log out there."""
    project = f", project {token.project}" if token.project else ""
    about = element("p", f"Logged in as {token.user}, role {token.role.value}{project}.")
    if not ticket:
        return about
    form = element(
        "form",
        element("input", type="hidden", name="ticket", value=ticket),
        element("button", "Log out", type="submit"),
        method="post", action=action,
    )  # fmt: skip
    return join([about, form])
