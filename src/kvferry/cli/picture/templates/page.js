"use strict";
// The page works without this: tables say what pictures show. This adds a tip where the pointer, a finger or
// the keyboard is, arrow keys inside a picture, and a button that copies a command.
(() => {
  const tip = document.getElementById("tip");
  const said = (element) => element.closest("[data-walk] [aria-label]");

  let shown = null;
  function show(element) {
    shown = element;
    tip.textContent = element.getAttribute("aria-label");
    tip.hidden = false;
    const at = element.getBoundingClientRect();
    const left = Math.min(Math.max(12, at.left + at.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 12);
    const above = at.top - tip.offsetHeight - 10;
    tip.style.transform = "translate(" + left + "px," + (above > 8 ? above : at.bottom + 10) + "px)";
  }
  function hide() {
    shown = null;
    tip.hidden = true;
  }

  for (const picture of document.querySelectorAll("[data-walk]")) {
    const parts = [...picture.querySelectorAll("[aria-label]")];
    const go = (index) => {
      const next = parts[(index + parts.length) % parts.length];
      parts.forEach((part) => part.setAttribute("tabindex", part === next ? "0" : "-1"));
      next.focus();
    };
    picture.addEventListener("keydown", (event) => {
      const index = parts.indexOf(event.target);
      const moves = { ArrowRight: index + 1, ArrowDown: index + 1, ArrowLeft: index - 1, ArrowUp: index - 1, Home: 0, End: -1 };
      if (event.key === "Escape") hide();
      if (index < 0 || !(event.key in moves)) return;
      event.preventDefault();
      go(moves[event.key]);
    });
    picture.addEventListener("pointerover", (event) => { const part = said(event.target); if (part) show(part); });
    picture.addEventListener("pointerout", hide);
    picture.addEventListener("focusin", (event) => show(event.target));
    picture.addEventListener("focusout", hide);
    picture.addEventListener("click", (event) => { const part = said(event.target); if (part) go(parts.indexOf(part)); });
  }
  // What has the focus may itself make the page scroll: its tip goes along. So does the tip of what the pointer is on:
  // browsers tell of a scroll late, when the pointer may have reached its part already.
  const isMeant = (element) => element === document.activeElement || element.matches(":hover");
  addEventListener("scroll", () => (shown && isMeant(shown) ? show(shown) : hide()), { passive: true });

  for (const button of document.querySelectorAll("[data-copy]")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
  document.documentElement.dataset.ready = "";
})();
