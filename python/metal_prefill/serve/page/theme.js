// Applies the chosen colours before the page is drawn: "light", "dark", or those of the system.
"use strict";
document.documentElement.dataset.theme = "system";
try {
  const theme = localStorage.getItem("theme");
  if (["light", "dark"].includes(theme)) document.documentElement.dataset.theme = theme;
} catch {
  // Storage is disabled: the colours are those of the system.
}
