// The search box of the home page opens the search of the theme.
document.addEventListener("click", event => {
  const button = event.target.closest("button.find")
  if (!button) return
  const toggle = document.getElementById("__search")
  if (toggle && !toggle.checked) toggle.click()
  document.querySelector("[data-md-component=search-query]")?.focus()
})
