import DOMPurify from "dompurify";

/** What a model's text may be made of. No `class` and no `id`: it must not look like a part of the page. */
const TAGS = [
  ..."a abbr b blockquote br caption code dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img ins kbd li mark ol p pre q".split(
    " ",
  ),
  ..."rp rt ruby s samp small span strong sub summary sup table tbody td tfoot th thead tr u ul var wbr".split(" "),
];
const ATTRIBUTES =
  "href src alt title align colspan rowspan start reversed open dir lang data-tex data-display data-task data-scroll data-language".split(
    " ",
  );
const OWN_IMAGE = /^(data:image\/(png|jpe?g|gif|webp|avif|bmp);base64,|\/?api\/sessions\/[^?#]*$)/i;

const OWN_FILE = /^\/api\/sessions\/[^/?#]+\/files\/[^/?#]+$/;

const purify = DOMPurify(window);

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    // Beside the page, which may be that of a profile.
    const path = node.getAttribute("href") ?? "";
    if (OWN_FILE.test(path)) node.setAttribute("href", path.slice(1));
    node.setAttribute("rel", "noopener noreferrer nofollow");
    node.setAttribute("target", "_blank");
  }
  if (node.tagName === "IMG") checkImage(node);
  if (node.tagName === "PRE" || node.hasAttribute("data-scroll")) node.setAttribute("tabindex", "0");
});

/** An image from elsewhere would tell its server who reads this, so a link stands in for it. */
function checkImage(image: Element): void {
  const source = image.getAttribute("src") ?? "";
  if (OWN_IMAGE.test(source)) {
    if (source.startsWith("/")) image.setAttribute("src", source.slice(1));
    image.setAttribute("loading", "lazy");
    return;
  }
  image.removeAttribute("src");
  const link = document.createElement("a");
  if (/^https?:\/\//i.test(source)) {
    link.setAttribute("href", source);
    link.setAttribute("rel", "noopener noreferrer nofollow");
    link.setAttribute("target", "_blank");
  }
  link.textContent = image.getAttribute("alt") || source.slice(0, 200) || "image";
  image.replaceWith(link);
}

export function sanitized(html: string): DocumentFragment {
  return purify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ATTRIBUTES,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    ALLOWED_URI_REGEXP: /^(?:(?:https?|mailto|tel):|data:image\/|[^a-z]|[a-z+.-]+(?:[^a-z+.\-:]|$))/i,
    RETURN_DOM_FRAGMENT: true,
  });
}
