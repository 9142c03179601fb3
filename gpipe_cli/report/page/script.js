"use strict";
// Tooltips. Texts are set as textContent; the script fetches nothing and evaluates nothing.
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

  const nearest = (places, share) => {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle][0] < share) low = middle; else high = middle;
    }
    return share - places[low][0] < places[high][0] - share ? places[low] : places[high];
  };

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
      const [share, text] = nearest(places, (event.clientX - box.left) / box.width);
      place(`${100 * share}%`);
      show(text, event.clientX, event.clientY);
    });
    area.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hide(); });
  }

  window.addEventListener("scroll", hide, true);
})();
