"use strict";
// Tooltips, and runs of a comparison that stand out. Texts are set as textContent; the script fetches nothing and evaluates nothing.
(() => {
  const tip = document.getElementById("tip");

  const hide = () => { tip.hidden = true; };

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = Math.min(x + 14, window.innerWidth - box.width - 8);
    const top = y + 18 + box.height > window.innerHeight ? y - box.height - 12 : y + 18;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  };

  // Without this script the browser shows each title after a delay, and never on touch screens.
  for (const title of document.querySelectorAll("svg title")) {
    const owner = title.parentElement;
    const text = title.textContent;
    owner.setAttribute("aria-label", text.replaceAll("\n", ", "));
    title.remove();
    const follow = (event) => show(text, event.clientX, event.clientY);
    owner.addEventListener("pointerenter", follow);
    owner.addEventListener("pointermove", follow);
    owner.addEventListener("pointerleave", hide);
  }

  // A page that a run wrote long ago says so: nothing else in it can tell that the run has died since.
  for (const time of document.querySelectorAll("time")) {
    const seconds = Math.round((Date.now() - Date.parse(time.dateTime)) / 1000);
    const minutes = Math.round(seconds / 60);
    time.textContent = seconds < 120 ? `${seconds} s ago` : `${minutes} min ago (gpipe runs shows if it is alive)`;
  }

  const nearest = (places, share) => {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle][0] < share) low = middle; else high = middle;
    }
    return share - places[low][0] < places[high][0] - share ? places[low] : places[high];
  };

  // In a comparison, pointing at a run fades the others; clicking on its key keeps it.
  const kept = new Set();
  const names = new Map();
  let pointed = null;

  const isShown = (run) => kept.size === 0 && pointed === null || kept.has(run) || run === pointed;

  const mark = (run) => {
    pointed = run;
    for (const shape of document.querySelectorAll(".area [data-run]")) {
      shape.classList.toggle("faded", !isShown(shape.dataset.run));
    }
  };

  const MAX_RUNS = 8;
  const ofShownRuns = (runs) => {
    const texts = runs.filter(([run]) => isShown(run)).map(([run, value]) => `${value}  ${names.get(run)}`);
    const more = texts.length - MAX_RUNS;
    return more > 1 ? [...texts.slice(0, MAX_RUNS), `and ${more} more`] : texts;
  };

  for (const shape of document.querySelectorAll("[data-run]")) {
    const run = shape.dataset.run;
    shape.addEventListener("pointerenter", () => mark(run));
    shape.addEventListener("pointerleave", () => mark(null));
    shape.addEventListener("focus", () => mark(run));
    shape.addEventListener("blur", () => mark(null));
    if (!shape.matches("button")) continue;
    names.set(run, shape.textContent);
    shape.addEventListener("click", () => {
      if (!kept.delete(run)) kept.add(run);
      shape.setAttribute("aria-pressed", String(kept.has(run)));
      mark(run);
    });
  }

  for (const plot of document.querySelectorAll("[data-hover]")) {
    const places = JSON.parse(plot.dataset.hover);
    const area = plot.querySelector(".area");
    const cross = plot.querySelector(".cross");
    const place = (at) => {
      cross.setAttribute("x1", at);
      cross.setAttribute("x2", at);
      cross.setAttribute("visibility", "visible");
    };
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect();
      const [share, text, runs] = nearest(places, (event.clientX - box.left) / box.width);
      place(`${100 * share}%`);
      show(runs ? [text, ...ofShownRuns(runs)].join("\n") : text, event.clientX, event.clientY);
    });
    area.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hide(); });
  }

  window.addEventListener("scroll", hide, true);
})();
