// What scrolls sideways can be reached by the keyboard.
function reach() {
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap"))
    if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
}
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  reach();
});
addEventListener("load", reach);
addEventListener("resize", reach);
