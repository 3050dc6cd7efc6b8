// Elements are made by these functions alone. Text becomes a text node; nothing is parsed as HTML.

/** Makes an element; attributes that begin with "on" are listeners. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Sets styles of an element, which its attributes may not contain, and returns it. */
export function styled(node, styles) {
  Object.assign(node.style, styles);
  return node;
}

/** A label and its control, which get a common id. */
export function field(id, label, control) {
  control.id = id;
  return el("div", { class: "field" }, el("label", { for: id }, label), control);
}

export const byId = (id) => document.getElementById(id);
