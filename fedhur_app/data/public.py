"""Public data sets that are not MovieLens: their archives, terms and counts."""

from fedhur_app.data.archives import Archive, Counts, Reading

BOOK_CROSSING_LICENCE = """\
Book-Crossing was collected by Cai-Nicolas Ziegler with the permission of BookCrossing. Terms: freely available for
research use when acknowledged with this reference:
Cai-Nicolas Ziegler, Sean M. McNee, Joseph A. Konstan, Georg Lausen. 2005. Improving Recommendation Lists Through Topic
Diversification. WWW '05, Chiba, Japan. https://doi.org/10.1145/1060745.1060754"""
AMAZON_LICENCE = """\
Amazon product data (2014) were collected by Julian McAuley, UC San Diego; the reviews are their authors' and Amazon's.
The publisher names no licence and offers them for research; publications cite
R. He, J. McAuley. 2016. Ups and downs: Modeling the visual evolution of fashion trends with one-class collaborative
filtering. WWW '16. https://doi.org/10.1145/2872427.2883037
J. McAuley, C. Targett, J. Shi, A. van den Hengel. 2015. Image-based recommendations on styles and substitutes.
SIGIR '15. https://doi.org/10.1145/2766462.2767755"""
LASTFM_LICENCE = """\
Last.fm data of HetRec 2011, built by I. Fernandez-Tobias with I. Cantador and A. Bellogin, Universidad Autonoma de
Madrid. Terms: non-commercial use (for anything else ask Last.fm); publications cite the Last.fm website,
http://www.lastfm.com, and
I. Cantador, P. Brusilovsky, T. Kuflik. 2011. 2nd Workshop on Information Heterogeneity and Fusion in Recommender
Systems (HetRec 2011). RecSys '11, Chicago, USA. https://doi.org/10.1145/2043932.2044016"""

# The author's server has been off for years; the mirror is PaddleRec's. MD5 and size as in the .dvc files of LensKit's
# bookdata-tools, lk-demo-experiment and lk-perf-monitor.
BOOK_CROSSING = Archive(
    (
        "http://www2.informatik.uni-freiburg.de/~cziegler/BX/BX-CSV-Dump.zip",
        "https://paddlerec.bj.bcebos.com/datasets/book-crossing/BX-CSV-Dump.zip",
    ),
    "md5:37d647ee9e18ba134ea6d78ee4fe5292",
    26085508,
)
# SHA-256 and size as in two public repositories that know nothing of each other (one keeps the file in Git LFS).
AMAZON_BEAUTY = Archive(
    (
        "https://snap.stanford.edu/data/amazon/productGraph/categoryFiles/reviews_Beauty_5.json.gz",
        "https://mcauleylab.ucsd.edu/public_datasets/data/amazon/categoryFiles/reviews_Beauty_5.json.gz",
    ),
    "sha256:e5925ec99023f1dc9c7d3dff7ef34cfeacd40d1b981b5525e1e4ba9c8abc18fe",
    44819276,
)
# SHA-256 as in OmniRec, MD5 as in DataRec (296d61afe4e8632b173fc2dd3be20ce2); no source for the size.
LASTFM = Archive(
    (
        "https://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
        "http://files.grouplens.org/datasets/hetrec2011/hetrec2011-lastfm-2k.zip",
    ),
    "sha256:6738f48195667ff03caaab4d32ca9a3133d8cc026b7c3cdaf6ce1010e913c59c",
)

# Some lines of BX-Book-Ratings.csv have quotes, backslashes or blanks in the ISBN (KONECT counts 41 such lines, and
# drops them): how they are read may change the numbers by less than a thousandth.
_DAMAGED_SHARE = 0.001
# Most of the 340,556 books were touched once. As usual in the literature only the k-core is kept: every user and every
# book has at least k interactions with the others of it. k is 10, and 5 for the explicit ratings, which are fewer.
BOOK_CROSSING_READING = Reading(
    options={"on_bad_line": "skip", "implicit_zeros": "keep"},
    filters={"k_core": (10, 10)},
    counts=Counts(105283, 340556, 1149780, _DAMAGED_SHARE),
)
# No source for the numbers of users and books with an explicit rating.
BOOK_CROSSING_EXPLICIT_READING = Reading(
    options={"on_bad_line": "skip", "implicit_zeros": "drop"},
    filters={"k_core": (5, 5)},
    counts=Counts(None, None, 433671, _DAMAGED_SHARE),
)
# As published it is the 5-core already; no pair occurs twice.
AMAZON_BEAUTY_READING = Reading(counts=Counts(22363, 12101, 198502))
# Ratings are counts of plays.
LASTFM_READING = Reading(counts=Counts(1892, 17632, 92834))
