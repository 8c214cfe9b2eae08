// Replace <main> with its newest version whenever the server reports a change, and say so if that is not possible.
"use strict";
{
  let isLoading = false;
  let isStale = false;
  let hasMissed = false;
  let newest = document.body.dataset.newest;
  const note = document.createElement("p");
  note.className = "note";
  note.setAttribute("role", "alert");
  const warn = (text) => {
    if (note.isConnected && note.textContent === text) return;
    note.textContent = text;
    document.querySelector("header").after(note);
  };
  const load = async () => {
    hasMissed = isLoading; // a change during a load needs another one
    const isBusy = document.activeElement && document.activeElement.closest("form");
    isStale = isLoading || document.hidden || Boolean(isBusy);
    if (isStale) return;
    isLoading = true;
    try {
      const answer = await fetch(location.href, {
        credentials: "same-origin",
        headers: { "Broker-After": newest },
      });
      if (answer.ok) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const scrolled = document.querySelector("pre")?.scrollTop;
        document.querySelector("main").replaceWith(page.querySelector("main"));
        const log = document.querySelector("pre");
        if (log && scrolled !== undefined) log.scrollTop = scrolled;
        if (changes.readyState === EventSource.OPEN) note.remove();
      } else {
        warn("This page is not up to date; load it again.");
      }
    } catch {
      isStale = true; // the server cannot be reached; the stream reports its return
    } finally {
      isLoading = false;
      if (hasMissed) load();
    }
  };
  const job = document.body.dataset.job;
  const changes = new EventSource(`/changes?after=${newest}${job ? `&job=${job}` : ""}`);
  changes.onmessage = (change) => {
    newest = change.data;
    load();
  };
  changes.onopen = () => note.remove();
  changes.onerror = () => {
    const isOver = changes.readyState === EventSource.CLOSED; // refused; otherwise the browser tries again
    warn(isOver ? "This page no longer updates; load it again." : "No connection: this page is not up to date.");
  };
  document.addEventListener("visibilitychange", () => isStale && load());
}
