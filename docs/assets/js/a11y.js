// Names for parts of the theme that screen readers would find without one.
(() => { // in a function: the theme's inline scripts own global names
  const names = {
    "[data-md-component=search]": () => "Search",
    "nav.md-tags": () => "Tags of this page",
    "nav.md-code__nav": e => "Code block " + (1 + [...document.querySelectorAll("nav.md-code__nav")].indexOf(e)),
  }
  const label = () => Object.entries(names).forEach(([selector, name]) =>
    document.querySelectorAll(`${selector}:not([aria-label])`).forEach(e => e.setAttribute("aria-label", name(e))))
  new MutationObserver(label).observe(document.body, { childList: true, subtree: true })
  label()
})()
