// Sources that ask the server of `eformer serve`, with the interface in base.js. This file is last, and starts the page.
"use strict";
(() => {
  const POLL = 2000, SOON = 400;  // milliseconds
  const gone = "The server does not answer. Is `eformer serve` still running?";
  const never = new Promise(() => {});

  const notice = eformer.h("p.failed", { role: "alert", hidden: true });
  document.body.prepend(notice);
  const complain = (text) => {
    notice.textContent = eformer.visible(text);
    notice.hidden = false;
    document.getElementById("app").removeAttribute("aria-busy");
  };

  // Ask for facts. Show an error that the server returns; the promise is then never fulfilled.
  const against = new URLSearchParams(location.search).get("against") ?? undefined;
  const ask = async (name, parameters = {}, options = {}) => {
    const query = new URLSearchParams(Object.entries({ ...parameters, against }).filter(([, value]) => value !== undefined));
    try {
      const answer = await fetch(`${name}.json?${query}`, { cache: "no-cache", ...options });
      const found = await answer.json();
      if (answer.ok) { notice.hidden = true; return found; }
      complain(found.error);
    } catch (error) {
      if (error.name !== "AbortError") complain(gone);
    }
    return never;
  };

  const checkpointSource = async () => {
    const [summary, leaves, against] = await Promise.all(["summary", "columns", "changes"].map((name) => ask(name)));
    let reading = new AbortController();
    // Selecting another leaf aborts the request, and the server stops reading the leaf.
    const read = (path) => {
      reading.abort();
      reading = new AbortController();
      return ask("leaf", { path }, { signal: reading.signal });
    };
    return eformer.checkpointSource({ summary, leaves, against }, { read, compare: () => ask("changes") });
  };

  // Poll the run. The server sends it only if it has changed. The badge says how long ago it answered.
  const runSource = () => {
    let known = "", answered = new Date().toISOString();
    const badge = eformer.h("span.live", { id: "live" }), status = eformer.h("p.sr", { role: "status", "aria-live": "polite" });
    document.body.append(status);
    const tick = () => {
      badge.classList.toggle("gone", !notice.hidden);
      badge.textContent = `${notice.hidden ? "live" : "not live"} · ${eformer.ago(answered)}`;
    };
    setInterval(tick, 1000);
    const look = async () => {
      try {
        const answer = await fetch("run.json", { cache: "no-store", headers: known ? { "If-None-Match": known } : {} });
        if (!answer.ok && answer.status !== 304) {  // it has not changed
          complain(`The server refuses to show the run (${answer.status}). Was \`eformer serve\` started again? Open the address that it prints.`);
          tick();
          return null;
        }
        notice.hidden = true;
        answered = new Date().toISOString();
        tick();
        if (!answer.ok) return null;
        known = answer.headers.get("ETag");
        return await answer.json();
      } catch {
        complain(gone);
        tick();
        return null;
      }
    };
    const waitFor = (run, drawing) => Math.max(run && !run.is_complete ? SOON : POLL, 4 * drawing) * (document.hidden ? 5 : 1);
    return {
      kind: "run", badge,
      say: (text) => { if (text) status.textContent = text; },
      run: async () => await look() ?? never,
      stepLink: (step) => `step/${step.number}/`,
      follow(draw) {
        const again = async () => {
          const run = await look(), start = performance.now();
          if (run) draw(run);
          setTimeout(again, waitFor(run, performance.now() - start));
        };
        setTimeout(again, SOON);
      },
    };
  };

  const sources = { run: runSource, checkpoint: checkpointSource };
  eformer.start(sources[document.documentElement.dataset.kind]());
})();
