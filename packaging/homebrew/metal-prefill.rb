# Formula for a tap. `brew update-python-resources metal-prefill` adds the resources of its Python dependencies, and
# `brew bump-formula-pr` sets the address and checksum of a release.
class MetalPrefill < Formula
  include Language::Python::Virtualenv

  desc "Fast prompt processing for small quantized Llama-family models"
  homepage "https://pypi.org/project/metal-prefill/"
  url "https://files.pythonhosted.org/packages/source/m/metal_prefill/metal_prefill-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "MIT"

  depends_on "cmake" => :build
  depends_on "ninja" => :build
  depends_on "rust" => :build # for tokenizers and safetensors
  depends_on macos: :ventura
  depends_on "numpy"
  depends_on "python@3.13"

  def install
    virtualenv_install_with_resources
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/metal-prefill --version")
    assert_match(/\S/, shell_output("#{bin}/metal-prefill run --device cpu -p ROMEO: -n 4"))
  end
end
