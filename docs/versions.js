/* The version in the header, with the others that lie beside it. `make docs` writes ../versions.js. */
const here = new URL(".", document.currentScript.src);
const list = document.createElement("script");
list.src = new URL("../versions.js", here);
list.onload = () => {
  const current = decodeURIComponent(here.pathname.split("/").at(-2));
  const select = document.createElement("select");
  select.className = "versions";
  select.ariaLabel = "version";
  for (const name of window.VERSIONS) select.append(new Option(name, name, false, name === current));
  select.onchange = () => { location.href = new URL(`../${select.value}/index.html`, here); };
  document.querySelector(".md-header__title").after(select);
};
document.head.append(list);
